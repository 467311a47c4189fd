"""Folders of every kind that the package writes, all written, gone on with and checked in one way."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from pylate_fastmaxsim import SparseBatch, SparseIndex, StaticLateInteraction, TokenBatch
from pylate_fastmaxsim.compressed import compress
from pylate_fastmaxsim.indexes import Exact
from pylate_fastmaxsim.kernels.sparse import postings
from pylate_fastmaxsim.retrieval.corpus import Corpus, write_corpus
from pylate_fastmaxsim.retrieval.formats import checksums, writer
from tests.support.corpora import FORMATS, unit_documents, vectors
from tests.support.sparse_vectors import assert_same, sorted_scores, sparse_vectors

COUNT, BEFORE, SIZE = 29, 13, 4  # documents in all, of a folder that is added to, and of a batch


def shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have small folders consist of many blocks and chunks, and nothing wait for the disk."""
    monkeypatch.setattr(postings, "DOCUMENTS_PER_BLOCK", 8)
    monkeypatch.setattr(checksums, "CHUNK", 64)
    monkeypatch.setattr(writer, "SECONDS_BETWEEN_NOTES", 0.0)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # power cuts are only thought of


def interrupt() -> None:
    raise KeyboardInterrupt


class Kind:
    """Documents of which batches are written behind those that a folder holds."""

    goes_on = True  # after an interruption, from what had been written
    adds = True  # to what a folder holds, in place of replacing it
    # Numbers of documents that an interrupted call has written and the next does not write again are multiples of it.
    kept_in = 1

    def __init__(self) -> None:
        self.asked: list[int] = []  # how many documents folders held when they were written

    def write(self, folder: Path, end: int = COUNT, fail_at: int = COUNT, fail: Callable[[], None] = interrupt) -> None:
        """Go on to ``end`` documents; ``fail`` is called in place of the first batch from ``fail_at`` on."""

        def batches(held: int) -> Iterator:
            self.asked.append(held)
            for begin in range(held, end, SIZE):
                if begin >= fail_at:
                    fail()
                yield self.batch(begin, min(begin + SIZE, end))

        self.write_batches(folder, batches)

    def held(self, folder: Path) -> int | None:
        """Number of documents, all of which are as they were written; None if it holds none. ValueError if damaged."""
        try:
            opened = self.open(folder)
        except ValueError as error:
            if "holds no" not in str(error):
                raise
            return None
        return self.checked(opened)


class Corpora(Kind):
    open = Corpus

    def __init__(self, format: object = None, backwards: bool = False) -> None:
        super().__init__()
        self.format, self.sequences = format, unit_documents(COUNT, seed=3)[:: -1 if backwards else 1]
        whole = TokenBatch.from_list(self.sequences)
        whole = compress(whole, format) if format else whole.with_values(whole.values.bfloat16())
        self.expected = vectors([whole])

    def batch(self, begin: int, end: int) -> TokenBatch:
        return TokenBatch.from_list(self.sequences[begin:end])

    def write_batches(self, folder: Path, batches: Callable) -> None:
        write_corpus(folder, batches, format=self.format)

    def checked(self, corpus: Corpus) -> int:
        count, middle = len(corpus), len(corpus) // 2
        halves = [corpus.select([*range(middle)]), corpus.select([*range(middle, count)])]
        assert vectors(corpus.batches(tokens_per_batch=9)) == vectors(halves) == self.expected[:count]
        return count


class Indexed(Corpora):
    """An index whose documents have ids, of which one is removed."""

    goes_on, removed = False, 3

    def __init__(self, format: object = None, backwards: bool = False) -> None:
        super().__init__(format, backwards)
        self.ids = [f"{'b' if backwards else 'a'}{number}" for number in range(COUNT)]

    def open(self, folder: Path) -> Exact:
        return Exact(folder.parent, folder.name, device="cpu")

    def write_batches(self, folder: Path, batches: Callable) -> None:
        index = Exact(folder.parent, folder.name, format=self.format, device="cpu")
        held = self.count(index)
        new = [each for batch in batches(held) for each in batch.values.split(batch.lengths.tolist())]
        index.add_documents(self.ids[held : held + len(new)], new)
        if self.ids[self.removed] in index.ids:
            index.remove_documents(self.ids[self.removed])

    def held(self, folder: Path) -> int | None:
        return super().held(folder) or None

    def count(self, index: Exact) -> int:
        return self.ids.index(index.ids[-1]) + 1 if len(index) else 0

    def checked(self, index: Exact) -> int:
        count = self.count(index)
        # The last step of writing it is to remove one.
        assert {*self.ids[:count]} - {*index.ids} <= {self.ids[self.removed]}
        kept = [(each, vector) for each, vector in zip(self.ids, self.expected, strict=True) if each in index.ids]
        if kept:
            [found] = index.get_documents_embeddings([[each for each, _ in kept]])
            assert [each.tolist() for each in found] == [vector for _, vector in kept]
        return count


class Built(Kind):
    """A sparse index that is built in its folder."""

    open, kept_in, removed = SparseIndex.load, 8, ()

    def __init__(self, backwards: bool = False) -> None:
        super().__init__()
        documents = sparse_vectors(COUNT, 30, seed=0)
        self.documents = documents.select(torch.arange(COUNT).flip(0)) if backwards else documents

    def batch(self, begin: int, end: int) -> SparseBatch:
        return self.documents.select(torch.arange(begin, end))

    def write_batches(self, folder: Path, batches: Callable) -> None:
        SparseIndex.build(batches, folder=folder)

    def checked(self, index: SparseIndex) -> int:
        count, documents = len(index), self.batch(0, len(index))
        removed = {each for each in self.removed if each < count}
        assert_same(index.search(self.documents, 9), sorted_scores(self.documents, documents, min(9, count), removed))
        return count


class Saved(Built):
    """A sparse index with ids that is loaded, added to and saved, without one document."""

    goes_on, removed = False, (3,)

    def __init__(self, backwards: bool = False) -> None:
        super().__init__(backwards)
        self.ids = [f"{'b' if backwards else 'a'}{number}" for number in range(COUNT)]

    def write_batches(self, folder: Path, batches: Callable) -> None:
        begun = (folder / "index.json").exists()
        index = SparseIndex.load(folder) if begun else SparseIndex.build(self.batch(0, 0), ids=[])
        held, new = len(index), SparseBatch.concatenate([self.batch(0, 0), *batches(len(index))])
        index.add(new, self.ids[held : held + len(new)])
        index.remove(ids=[self.ids[position] for position in self.removed if position >= held])
        index.save(folder)

    def checked(self, index: SparseIndex) -> int:
        count = super().checked(index)
        assert index.ids == [each for at, each in enumerate(self.ids[:count]) if at not in self.removed]
        return count


class Model(Kind):
    """A static model, whose vectors, words and threshold are all of a number."""

    goes_on, adds, open = False, False, StaticLateInteraction.load

    def __init__(self, backwards: bool = False) -> None:
        super().__init__()
        self.first = 100 if backwards else 0

    def write(self, folder: Path, end: int = COUNT, **_: object) -> None:
        number = self.first + end
        words = {f"{word}{number}": place for place, word in enumerate("abcd")}
        tokenizer = Tokenizer(WordLevel(words, unk_token=f"a{number}"))
        vectors = torch.full((4, 8), float(number))
        StaticLateInteraction(vectors, None, tokenizer, threshold=float(number), normalize=False).save(folder)

    def checked(self, model: StaticLateInteraction) -> int:
        number = int(model.threshold)
        assert model.query_vectors.eq(number).all() and model.tokenizer.token_to_id(f"d{number}") == 3
        return number


# By name, how to make one. ``backwards``: another one, of files that are as large.
MAKERS: dict[str, Callable[..., Kind]] = {name: partial(Corpora, format) for name, format in FORMATS.items()}
MAKERS |= {"index": partial(Indexed, "int8"), "sparse": Built, "saved": Saved, "static": Model}
KINDS = {name: make() for name, make in MAKERS.items()}


def checksums_of(*contents: bytes) -> np.ndarray:
    """Of the chunks of files, one file after the other."""
    size = checksums.CHUNK
    chunks = (content[begin : begin + size] for content in contents for begin in range(0, len(content), size))
    return np.array([xxhash.xxh3_64_intdigest(chunk) for chunk in chunks], np.uint64)


def files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.name != "lock")


def contents(folder: Path) -> dict[str, bytes]:
    """All but descriptions, which hold numbers drawn at random."""
    return {file.name: file.read_bytes() for file in files(folder) if file.suffix in (".bin", ".safetensors")}
