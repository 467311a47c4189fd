"""A corpus on disk holds what was written, in each format and of several ranks, and search finds the same as in memory."""

import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pylate_fastmaxsim import TokenBatch, maxsim
from pylate_fastmaxsim.compressed import CompressedBatch, compress
from pylate_fastmaxsim.files.lock import writing
from pylate_fastmaxsim.retrieval.corpus import Corpus, write_corpus
from pylate_fastmaxsim.retrieval.formats import checksums, description
from pylate_fastmaxsim.retrieval.formats.description import Held
from pylate_fastmaxsim.retrieval.formats.format import Format
from pylate_fastmaxsim.retrieval.search import search
from tests.support.corpora import FORMATS, codec, documents, grouped, unit_documents, vectors
from tests.support.stored import Corpora, checksums_of


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 40),
    size=st.integers(1, 12),
    tokens=st.sampled_from([1, 9, 30, 60, 1 << 20]),
    stored=st.sampled_from([torch.bfloat16, torch.float16, torch.float32, "int8", "fp8", codec(), codec(bits=4)]),
    share=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_what_is_read_is_what_was_written(count, size, tokens, stored, share, tmp_path_factory):
    """Of the tokens that count, also where documents lie in another order in memory."""
    sequences, generator = unit_documents(count), torch.Generator().manual_seed(count)
    kept = torch.rand(sum(map(len, sequences)), generator=generator) < 0.8
    order = torch.randperm(count, generator=generator)
    whole = TokenBatch.from_list(sequences)
    batch = TokenBatch(whole.values, whole.starts, whole.lengths, whole.max_length, kept)
    parts = kept.split([len(sequence) for sequence in sequences])
    live = TokenBatch.from_list([sequences[number][parts[number]] for number in order.tolist()])
    dtype = stored if isinstance(stored, torch.dtype) else None
    # The first batch sets the scale of fp8.
    batches = [batch.select(part) for part in order.split(count if stored == "fp8" else size)]
    options = {"dtype": dtype} if dtype else {"format": stored}
    read = Corpus(write_corpus(tmp_path_factory.mktemp("corpus") / "new", batches, **options).folder)
    expected = vectors([live.with_values(live.values.to(dtype)) if dtype else compress(live, stored)])
    assert (len(read), read.dim, read.dtype, read.tokens) == (count, 16, dtype, int(kept.sum()))
    files = [file for file in read.folder.glob("*.bin") if not file.name.startswith("checksums-")]
    assert read.nbytes == sum(file.stat().st_size for file in files)
    begin, end = sorted(round(count * part) for part in share)
    for first, last in ((0, None), (begin, end)):
        batches = list(read.batches(tokens_per_batch=tokens, begin=first, end=last))
        assert vectors(batches) == expected[first:last]
        for batch in batches:
            assert batch.gapless and len(batch) > 0 and batch.max_length == batch.lengths.max()
            assert isinstance(batch, CompressedBatch) if dtype is None else batch.values.dtype == dtype
            assert batch.lengths.sum() <= tokens or len(batch) == 1
        # As few as there can be: no batch has room for the first document of the next.
        for batch, after in pairwise(batches):
            assert batch.lengths.sum() + after.lengths[0] > tokens
    chosen = [count - 1, 0, count // 2, count // 2]
    assert vectors([read.select(torch.tensor(chosen))]) == [expected[i] for i in chosen]
    assert len(read.select([])) == 0


def test_on_a_cpu_nothing_is_copied(tmp_path):
    read = write_corpus(tmp_path / "new", grouped(documents(20), 20))
    whole = read.parts[0].arrays["values"].untyped_storage().data_ptr()
    found = [batch.values.untyped_storage().data_ptr() for batch in read.batches(tokens_per_batch=9)]
    assert len(found) > 3 and {*found} == {whole}


@pytest.fixture
def larger_than_memory(tmp_path) -> Corpus:
    """256 GiB that take no room and are read at their end only, where three tokens are not zero."""
    d, count, tokens = 128, 1 << 20, 1 << 30
    last = bytes(checksums.CHUNK - 3 * d * 2) + 3 * d * b"\x80\x3f"  # 1 in bfloat16
    with open(tmp_path / "values.bin", "wb") as file:
        file.truncate(tokens * d * 2)
        file.seek(-len(last), os.SEEK_END)
        file.write(last)
    bounds = (torch.arange(count + 1) * (tokens // count)).numpy().tobytes()
    (tmp_path / "bounds.bin").write_bytes(bounds)
    zeros = checksums_of(bytes(checksums.CHUNK)).repeat(tokens * d * 2 // checksums.CHUNK - 1)
    table = np.concatenate([zeros, checksums_of(last, bounds)])
    description.finish(tmp_path, Held(Format("bfloat16", d), count, tokens, table, 0, "identity"))
    return Corpus(tmp_path)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_larger_than_memory_and_offsets_past_two_to_the_31(device, larger_than_memory):
    read = larger_than_memory
    (batch,) = read.batches(device, begin=len(read) - 5)
    assert batch.lengths.tolist() == [1024] * 5
    assert batch.values[-5:].sum(1).tolist() == [0, 0, 128, 128, 128]
    assert maxsim(torch.ones(1, 1, 128, dtype=torch.bfloat16, device=device), batch).tolist() == [[0, 0, 0, 0, 128]]


def test_no_documents_and_documents_without_tokens(tmp_path):
    empty = TokenBatch.from_list([torch.empty(0, 3)])
    queries = TokenBatch.from_list([torch.ones(2, 3)])
    read = write_corpus(tmp_path / "blank", [empty, empty], torch.float32)
    assert (len(read), read.tokens) == (2, 0)
    assert [x.tolist() for x in search(queries, read.batches(), 3)] == [[[0.0, 0.0]], [[0, 1]]]
    none = write_corpus(tmp_path / "none", [empty.select(torch.tensor([], dtype=torch.int64))])
    assert len(none) == 0 and list(none.batches()) == []


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_several_processes_write_one_corpus(format, tmp_path):
    sequences = unit_documents(50)
    shares = [sequences[:20], sequences[20:21], sequences[21:]]
    for rank in (2, 0):
        part = write_corpus(tmp_path, grouped(shares[rank], 7), format=format, rank=(rank, 3))
        assert len(part) == len(shares[rank])
        with pytest.raises(ValueError, match=r"Corpus: .* lacks the documents of rank . of 3: .* rank=\(., 3\)"):
            Corpus(tmp_path)
    write_corpus(tmp_path, grouped(shares[1], 7), format=format, rank=(1, 3))
    read, whole = Corpus(tmp_path), write_corpus(tmp_path / "whole", grouped(sequences, 50), format=format)
    expected = vectors(whole.batches())
    assert (len(read), read.tokens, vectors(read.batches(tokens_per_batch=40))) == (50, whole.tokens, expected)
    assert vectors(read.batches(begin=19, end=22)) == expected[19:22]
    chosen = [49, 20, 3, 21, 0, 20]
    assert vectors([read.select(torch.tensor(chosen))]) == [expected[i] for i in chosen]


@pytest.mark.parametrize("format", [None, "fp8", codec()], ids=["bfloat16", "fp8", "residual"])
def test_a_finished_rank_takes_no_more_documents_unless_it_is_the_last(format, tmp_path):
    sequences = unit_documents(20)
    shares, more = [sequences[:5], sequences[5:10]], sequences[10:]

    def write(rank, documents):
        return write_corpus(tmp_path, lambda held: grouped(documents[held:], 3), format=format, rank=(rank, 2))

    for rank, share in enumerate(shares):
        write(rank, share)
    before = vectors(Corpus(tmp_path).batches())
    empty = TokenBatch.from_list(sequences[:1]).select(torch.tensor([], dtype=torch.int64))
    for nothing in ([], [empty]):
        assert len(write_corpus(tmp_path, lambda held, nothing=nothing: nothing, format=format, rank=(0, 2))) == 5
    with pytest.raises(ValueError, match="rank-00000-of-00002 is finished with 5 documents, and more would move"):
        write(0, shares[0] + more)
    assert vectors(Corpus(tmp_path).batches()) == before
    assert len(write(1, shares[1] + more)) == 15
    assert vectors(Corpus(tmp_path).batches())[:10] == before and len(Corpus(tmp_path)) == 20


def test_ranks_may_have_fp8_scales_of_their_own(tmp_path):
    for rank, size in enumerate((1.0, 3.0)):
        write_corpus(tmp_path, [TokenBatch.from_list([torch.full((2, 4), size)])], format="fp8", rank=(rank, 2))
    read = Corpus(tmp_path)
    assert vectors(read.batches()) == [[[1.0] * 4] * 2, [[3.0] * 4] * 2]
    assert vectors([read.select([1])]) == [[[3.0] * 4] * 2]
    with pytest.raises(ValueError, match="Corpus.select: these documents are in parts of other codecs or fp8 scales; "):
        read.select([0, 1])
    assert [block.tolist() for block in read.blocks(torch.tensor([0, 1]), 100)] == [[0], [1]]


def numbers(value: float, d: int = 16) -> TokenBatch:
    return TokenBatch.from_list([torch.full((1, d), value, dtype=torch.float64)])


@pytest.mark.parametrize(
    ("wrong", "options", "error", "sentence"),
    [
        (3, {}, TypeError, "batches must be batches of documents, as a list of TokenBatch, got int"),
        ([torch.ones(1, 2), "text"], {}, TypeError, r"each of batches must be a tensor \[L, d\], got str.$"),
        ([], {}, ValueError, "there must be at least one batch"),
        ([numbers(1.0, d) for d in (2, 3)], {}, ValueError, "all batches must have the same d, .* got 2 and 3"),
        ([numbers(1.0)], {"format": codec(d=8)}, ValueError, "the same d, also that of a codec .*, got 8 and 16"),
        ([numbers(1e39)], {}, ValueError, "too large for torch.bfloat16"),
        ([numbers(1.0), numbers(2.0)], {"format": "fp8"}, ValueError, "at most 1.75 in magnitude, .* scale 0.00390625"),
        ([numbers(1.0)], {"dtype": torch.float64}, ValueError, "dtype must be one of .*, got torch.float64"),
        ([numbers(1.0)], {"format": "int4"}, ValueError, "format must be None, 'int8', .*Codec, got 'int4'"),
        ([], {"format": "int8", "dtype": torch.float32}, ValueError, "dtype is of documents that are not compressed"),
        ([], {"rank": (2, 2)}, ValueError, r"rank \(r, n\) must have r from 0 to n - 1, got \(2, 2\)"),
    ],
)
def test_after_a_wrong_call_the_right_one_writes(wrong, options, error, sentence, tmp_path):
    with pytest.raises(error, match=f"(?s)^(write_corpus|compress): .*{sentence}"):
        write_corpus(tmp_path / "new", wrong, **options)
    assert len(write_corpus(tmp_path / "new", [numbers(1.0)])) == 1


@pytest.mark.parametrize(
    ("method", "argument", "error", "sentence"),
    [
        ("batches", {"tokens_per_batch": 0}, ValueError, "tokens_per_batch must be at least 1, got 0"),
        ("batches", {"begin": 3, "end": 2}, ValueError, "in order and from 0 to 5, got 3 and 2"),
        ("batches", {"end": 6}, ValueError, "in order and from 0 to 5, got 0 and 6"),
        ("select", {"positions": [5]}, ValueError, "positions must be from 0 to 4, got"),
        ("select", {"positions": [-1]}, ValueError, "positions must be from 0 to 4, got"),
        ("select", {"positions": torch.tensor([[1]])}, TypeError, "positions must be int"),
        ("select", {"positions": torch.ones(5, dtype=torch.bool)}, TypeError, "positions must be int"),
    ],
)
def test_what_cannot_be_read_is_refused(method, argument, error, sentence, tmp_path):
    read = write_corpus(tmp_path, grouped(documents(5), 5))
    with pytest.raises(error, match=f"^Corpus.{method}: .*{sentence}"):
        getattr(read, method)(**argument)


def interrupted(folder: Path, at: int = 20, format: object = None) -> None:
    with pytest.raises(KeyboardInterrupt):
        Corpora(format).write(folder, fail_at=at)


def rest(held: int) -> list[TokenBatch]:
    return grouped(unit_documents(30)[held:], 5)


def test_what_others_have_written_is_not_overwritten(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "values.bin").write_text("of somebody else")
    interrupted(tmp_path / "plain")
    interrupted(tmp_path / "codec", format=codec())
    write_corpus(tmp_path / "ranks", rest(25), format="int8", rank=(0, 2))
    before = {file: file.read_bytes() for file in tmp_path.rglob("*.*") if file.is_file()}
    begun = "holds 20 documents of the format 'bfloat16', which cannot go on with"
    for folder, batches, options, sentence in (
        ("notes", rest, {}, "must be empty; choose another folder, or remove what it holds.$"),
        ("plain", rest(0), {}, "must be empty; .* or go on with its 20 documents, with a function as"),
        ("plain", [], {}, "must be empty; .* or go on with its 20 documents, with a function as"),
        ("plain", rest, {"format": "int8"}, f"{begun} int8; choose another"),
        ("plain", rest, {"dtype": torch.float32}, f"{begun} float32"),
        ("plain", rest, {"format": codec()}, f"{begun} a codec of 2 bits and d = 16"),
        ("plain", rest, {"rank": (0, 2)}, r"holds a corpus of one process, to which rank \(0, 2\) cannot add"),
        ("plain", lambda held: [numbers(1.0, 2)], {}, "must have the same d, .* got 16 and 2"),
        ("codec", rest, {"format": codec(seed=1)}, r"not the one that they were begun with \(codec.safetensors\)"),
        ("ranks", rest(25), {"rank": (0, 3)}, r"holds a corpus of 2 ranks, to which rank \(0, 3\) cannot add; choose"),
    ):
        with pytest.raises(ValueError, match=f"^write_corpus: .*{sentence}"):
            write_corpus(tmp_path / folder, batches, **options)
    with writing("test", tmp_path / "plain"), pytest.raises(ValueError, match="is being written by another process"):
        write_corpus(tmp_path / "plain", rest)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*.*") if file.is_file()} == before
    for folder, sentence in (
        ("plain", "plain holds no complete corpus, .* or go on with what an interrupted call has"),
        ("absent", "absent holds no complete corpus"),
        ("ranks", r"ranks lacks the documents of rank 1 of 2: .* rank=\(1, 2\)"),
    ):
        with pytest.raises(ValueError, match=f"^Corpus: .*{sentence}"):
            Corpus(tmp_path / folder)
    for name, format in (("plain", None), ("codec", codec())):
        assert len(write_corpus(tmp_path / name, rest, format=format)) == 30
    write_corpus(tmp_path / "ranks", rest(25), format="fp8", rank=(1, 2))
    with pytest.raises(ValueError, match="must be of one format and d, but .*rank-00001-of-00002 is fp8 of d = 16"):
        Corpus(tmp_path / "ranks")
    # Without a document another format may begin.
    interrupted(tmp_path / "begun", at=0, format="int8")
    assert write_corpus(tmp_path / "begun", rest, format=codec()).format == "residual"
