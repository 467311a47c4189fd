"""Damage to the files of a corpus: an error that names the file or the same results, never others."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash

from pylate_fastmaxsim import TokenBatch
from pylate_fastmaxsim.files.record import read_record
from pylate_fastmaxsim.retrieval.corpus import Corpus, write_corpus
from pylate_fastmaxsim.retrieval.formats import checksums, description
from pylate_fastmaxsim.retrieval.search import search
from pylate_fastmaxsim.retrieval.soundness import repair_corpus
from tests.support.corpora import codec, grouped, lists, unit_documents

FORMATS = {"bfloat16": None, "int8": "int8", "fp8": "fp8", "residual": codec()}
SEQUENCES = unit_documents(24, seed=5)
QUERIES = TokenBatch.from_list(unit_documents(4, seed=1)[-2:])

FLIPS = 15  # of each file


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(checksums, "CHUNK", 32)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # which takes its time


@pytest.fixture(params=FORMATS)
def corpus(request, tmp_path) -> Corpus:
    return write_corpus(tmp_path, grouped(SEQUENCES, 7), format=FORMATS[request.param])


def files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.name != "lock")


def data_files(folder: Path) -> list[Path]:
    return [file for file in files(folder) if file.suffix == ".bin" and not file.name.startswith("checksums-")]


def vectors(batch) -> list[list]:
    return lists([batch if isinstance(batch, TokenBatch) else batch.decompress()])


READINGS = {
    "batches": lambda corpus: [document for batch in corpus.batches(tokens_per_batch=9) for document in vectors(batch)],
    "some": lambda corpus: [document for batch in corpus.batches(begin=5, end=9) for document in vectors(batch)],
    "select": lambda corpus: vectors(corpus.select([17, 3, 3])),
    "search": lambda corpus: [each.tolist() for each in search(QUERIES, corpus, 5)],
    "rescore": lambda corpus: [
        each.tolist()
        for each in search(QUERIES, [TokenBatch.from_list(SEQUENCES)], 2, rescore=corpus, candidates_per_result=2)
    ],
    "sizes": lambda corpus: [len(corpus), corpus.tokens, corpus.dim, corpus.format],
}


def results(folder: Path, file: Path) -> dict[str, list | None]:
    """What is read of a folder by each reading; None where it is refused, in one sentence that names the file."""
    found = {}
    for name, reading in READINGS.items():
        try:
            found[name] = reading(Corpus(folder))
        except ValueError as error:
            assert str(file) in str(error) and "\n" not in str(error)
            found[name] = None
    return found


def test_a_flipped_bit_changes_no_result(corpus, tmp_path):
    expected, refused = results(tmp_path, tmp_path), 0
    assert None not in expected.values()
    for file in files(tmp_path):
        numbers, content = random.Random(file.name[:9]), file.read_bytes()
        for _ in range(FLIPS):
            damaged = bytearray(content)
            damaged[numbers.randrange(len(content))] ^= 1 << numbers.randrange(8)
            file.write_bytes(damaged)
            found = results(tmp_path, file)
            assert all(each in (None, expected[name]) for name, each in found.items())
            refused += found["batches"] is None
        file.write_bytes(content)
    assert refused > FLIPS * (len(files(tmp_path)) - 2)


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_a_flipped_bit_of_an_unfinished_corpus_changes_no_result(format, tmp_path):
    def batches(held: int, fails: bool = False):
        yield from grouped(SEQUENCES[held : held + 14], 7)
        if fails:
            raise KeyboardInterrupt
        yield from grouped(SEQUENCES[held + 14 :], 7)

    expected = results(write_corpus(tmp_path / "whole", batches, format=format).folder, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        write_corpus(tmp_path / "new", lambda held: batches(held, fails=True), format=format)
    kept, numbers = {file: file.read_bytes() for file in files(tmp_path / "new")}, random.Random(0)
    for file in kept:
        for _ in range(FLIPS // 3):
            damaged = bytearray(kept[file])
            damaged[numbers.randrange(len(damaged))] ^= 1 << numbers.randrange(8)
            file.write_bytes(damaged)
            try:
                write_corpus(tmp_path / "new", batches, format=format)
            except ValueError as error:
                assert str(file) in str(error) and "\n" not in str(error)
            else:
                found = results(tmp_path / "new", file)
                assert all(each in (None, expected[name]) for name, each in found.items())
            for each in files(tmp_path / "new"):
                each.unlink()
            for each, content in kept.items():
                each.write_bytes(content)


@pytest.mark.parametrize("number", [0, 3, 4, 17, 24])
def test_a_bound_that_is_one_more_or_less_changes_no_result(number, corpus, tmp_path):
    expected, file = results(tmp_path, tmp_path), tmp_path / "bounds.bin"
    bounds = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.int64)
    for other in (bounds[number] - 1, bounds[number] + 1):
        changed = bounds.clone()
        changed[number] = other
        file.write_bytes(changed.numpy().tobytes())
        found = results(tmp_path, file)
        assert all(each in (None, expected[name]) for name, each in found.items()) and found["batches"] is None
        assert (found["select"] is None) >= (number == 4)


def test_files_that_are_short_or_missing_are_named(corpus, tmp_path):
    for file in files(tmp_path):
        content = file.read_bytes()
        for damage in (lambda file: os.truncate(file, os.stat(file).st_size - 2), os.remove):
            damage(file)
            what = "holds no complete corpus" if not file.exists() and file.name == "corpus.json" else str(file)
            with pytest.raises(ValueError, match=what):
                Corpus(tmp_path)
            file.write_bytes(content)
    assert results(tmp_path, tmp_path)["batches"] is not None


def test_files_of_another_corpus_are_refused(corpus, tmp_path):
    other = write_corpus(tmp_path / "other", grouped(SEQUENCES[::-1], 7), format=FORMATS[corpus.format])
    for file in data_files(tmp_path):
        content = file.read_bytes()
        file.write_bytes((other.folder / file.name).read_bytes())
        with pytest.raises(
            ValueError, match=f"Corpus: {file} is damaged in the bytes from .*; put it back, or write the"
        ):
            Corpus(tmp_path).verify()
        file.write_bytes(content)
    Corpus(tmp_path).verify()


def test_a_codec_that_is_not_that_of_the_corpus(tmp_path):
    write_corpus(tmp_path, grouped(SEQUENCES, 5), format=codec())
    codec(seed=1).save(tmp_path / "codec.safetensors")
    with pytest.raises(
        ValueError, match="codec.safetensors is not the codec that the corpus was written with; put that"
    ):
        Corpus(tmp_path)


def resealed(folder: Path) -> None:
    """Describe files as they are now, as a faulty writer would."""
    held = description.read(folder)
    table = [
        xxhash.xxh3_64_intdigest(content[begin : begin + checksums.CHUNK])
        for name in held.sizes
        for content in [(folder / f"{name}.bin").read_bytes()]
        for begin in range(0, len(content), checksums.CHUNK)
    ]
    description.finish(folder, held._replace(checksums=np.array(table, np.uint64)))


@pytest.mark.parametrize("read", [lambda corpus: list(corpus.batches()), lambda corpus: corpus.select([3, 23])])
def test_codes_that_are_no_centroids_reach_no_kernel(read, tmp_path):
    write_corpus(tmp_path, grouped(SEQUENCES, 5), format=codec())
    content = bytearray((tmp_path / "codes.bin").read_bytes())
    content[-1] = 1  # of the last code, 2**24
    (tmp_path / "codes.bin").write_bytes(content)
    resealed(tmp_path)
    with pytest.raises(ValueError, match="Corpus: codes of the documents of .*bounds.bin must be from 0 to 7"):
        read(Corpus(tmp_path))


def test_damage_is_not_sealed_by_adding_documents(corpus, tmp_path):
    for file in data_files(tmp_path):
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(ValueError, match=f"{file} is damaged"):
            more = grouped(unit_documents(3), 3)
            write_corpus(tmp_path, lambda held, more=more: more, format=FORMATS[corpus.format]).verify()
        file.write_bytes(content)


def test_a_corpus_is_cut_back_to_what_is_sound(corpus, tmp_path):
    expected = READINGS["batches"](Corpus(tmp_path))
    kept = {file: file.read_bytes() for file in files(tmp_path)}
    assert repair_corpus(tmp_path) == 24 and {file: file.read_bytes() for file in files(tmp_path)} == kept
    for file in data_files(tmp_path):
        size = len(kept[file])
        for number, damage in enumerate((size // 2, size - 40, 0)):
            content = bytearray(kept[file])
            content[damage] ^= 4
            file.write_bytes(content[:damage] if number == 1 else content)  # truncated as well
            if number == 2:
                with pytest.raises(
                    ValueError, match=f"repair_corpus: {tmp_path} has no sound document; write the corpus"
                ):
                    repair_corpus(tmp_path)
            else:
                generation = read_record(tmp_path / "corpus.json")["generation"]
                documents = repair_corpus(tmp_path)
                assert 0 < documents < 24
                assert READINGS["batches"](Corpus(tmp_path)) == expected[:documents]
                assert read_record(tmp_path / "corpus.json")["generation"] == generation + 1
                written = write_corpus(
                    tmp_path, lambda held: grouped(SEQUENCES[held:], 7), format=FORMATS[corpus.format]
                )
                assert READINGS["batches"](written) == expected
            for each in files(tmp_path):
                each.unlink()
            for each, content in kept.items():
                each.write_bytes(content)


def test_no_more_is_cut_off_than_is_damaged(tmp_path):
    corpus = write_corpus(tmp_path, grouped(SEQUENCES, 7))
    content = bytearray((tmp_path / "values.bin").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "values.bin").write_bytes(content)
    kept = repair_corpus(tmp_path)
    damaged = len(content) // 2 // checksums.CHUNK * checksums.CHUNK
    ends = corpus.parts[0].bounds * 16 * 2
    assert ends[kept] <= damaged < ends[kept + 1]


def test_of_several_ranks_only_the_last_is_cut_back(tmp_path):
    for rank in (0, 1):
        write_corpus(tmp_path, grouped(SEQUENCES[12 * rank :][:12], 7), rank=(rank, 2))
    damaged = [tmp_path / f"rank-0000{rank}-of-00002" / "values.bin" for rank in (0, 1)]
    os.truncate(damaged[1], damaged[1].stat().st_size // 2)
    kept = repair_corpus(tmp_path)
    assert 12 < kept < 24 and len(Corpus(tmp_path)) == kept
    damaged[0].write_bytes(bytes(damaged[0].stat().st_size))
    with pytest.raises(ValueError, match=f"Corpus: {damaged[0]} is damaged"):
        repair_corpus(tmp_path)
