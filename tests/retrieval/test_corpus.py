"""A corpus on disk holds what was written, and search finds the same as in memory."""

from __future__ import annotations

import os
import threading
import weakref

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from pylate_fastmaxsim import TokenBatch, maxsim
from pylate_fastmaxsim.retrieval.corpus import Corpus, write_corpus
from pylate_fastmaxsim.retrieval.formats import checksums as chunked
from pylate_fastmaxsim.retrieval.formats import description, reading
from pylate_fastmaxsim.retrieval.formats.description import Held
from pylate_fastmaxsim.retrieval.formats.format import Format
from pylate_fastmaxsim.retrieval.search import search
from tests.support.corpora import documents, grouped, lists

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@settings(max_examples=30, deadline=None)
@given(
    count=st.integers(1, 40),
    size=st.integers(1, 12),
    tokens=st.integers(1, 60),
    dtype=st.sampled_from(DTYPES),
    share=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_what_is_read_is_what_was_written(count, size, tokens, dtype, share, tmp_path_factory):
    sequences = documents(count)
    written = write_corpus(tmp_path_factory.mktemp("corpus") / "new", grouped(sequences, size), dtype)
    read = Corpus(written.folder)
    assert (len(read), read.dim, read.dtype) == (count, 3, dtype)
    assert read.tokens == sum(map(len, sequences))
    begin, end = sorted(round(count * part) for part in share)
    for first, last in ((0, None), (begin, end)):
        batches = list(read.batches(tokens_per_batch=tokens, begin=first, end=last))
        assert lists(batches) == [sequence.tolist() for sequence in sequences[first:last]]
        for batch in batches:
            assert batch.values.dtype == dtype and batch.gapless and len(batch) > 0
            assert len(batch.values) == batch.lengths.sum() and batch.max_length == batch.lengths.max()
            assert len(batch.values) <= tokens or len(batch) == 1
        # As few as there can be: no batch has room for the first document of the next.
        for batch, after in zip(batches, batches[1:], strict=False):
            assert len(batch.values) + after.lengths[0] > tokens


def test_tokens_that_do_not_count_are_left_out(tmp_path):
    padded = torch.arange(24.0).reshape(3, 4, 2)
    mask = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    packed = TokenBatch.from_packed(torch.arange(12.0).reshape(6, 2), torch.tensor([0, 2, 6]))
    # In another order than they lie in memory, with rows between them that belong to none.
    chosen = packed.select(torch.tensor([1, 0, 1])[:2])
    read = write_corpus(tmp_path / "new", [TokenBatch.from_padded(padded, mask), chosen], torch.float32)
    expected = [padded[0, [0, 2]], torch.empty(0, 2), padded[2], packed.values[2:], packed.values[:2]]
    assert lists(read.batches()) == [tokens.tolist() for tokens in expected]


@pytest.mark.parametrize("dtype", DTYPES)
def test_search_equals_search_in_memory(dtype, tmp_path):
    sequences = [tokens.to(dtype) for tokens in documents(300, longest=20, d=8)]
    queries = TokenBatch.from_list([tokens.to(dtype) for tokens in documents(7, d=8, seed=1)])
    read = write_corpus(tmp_path / "new", grouped(sequences, 50), dtype)
    in_memory = search(queries, [TokenBatch.from_list(sequences)], 40)
    for tokens in (1, 100, 1 << 20):
        assert all(map(torch.equal, search(queries, read.batches(tokens_per_batch=tokens), 40), in_memory))


def test_on_a_cpu_nothing_is_copied(tmp_path):
    read = write_corpus(tmp_path / "new", grouped(documents(20), 20))
    whole = read.parts[0].arrays["values"].untyped_storage().data_ptr()
    batches = list(read.batches(tokens_per_batch=9))
    assert len(batches) > 3 and {batch.values.untyped_storage().data_ptr() for batch in batches} == {whole}


def checksums(file, begin: int = 0) -> list[int]:
    with open(file, "rb") as opened:
        opened.seek(begin, os.SEEK_SET if begin >= 0 else os.SEEK_END)
        return [xxhash.xxh3_64_intdigest(chunk) for chunk in iter(lambda: opened.read(chunked.CHUNK), b"")]


def sparse(folder) -> Corpus:
    """256 GiB that take no room and are read at their end only, where three tokens are not zero."""
    d, count, tokens = 128, 1 << 20, 1 << 30
    with open(folder / "values.bin", "wb") as file:
        file.truncate(tokens * d * 2)
        file.seek(-3 * d * 2, os.SEEK_END)
        file.write(torch.ones(3, d, dtype=torch.bfloat16).view(torch.uint8).numpy().data)
    (folder / "bounds.bin").write_bytes((torch.arange(count + 1) * (tokens // count)).numpy().data)
    values = np.full(tokens * d * 2 // chunked.CHUNK, xxhash.xxh3_64_intdigest(bytes(chunked.CHUNK)), np.uint64)
    values[-1] = checksums(folder / "values.bin", -chunked.CHUNK)[0]
    table = np.concatenate([values, np.array(checksums(folder / "bounds.bin"), np.uint64)])
    description.finish(folder, Held(Format("bfloat16", d), count, tokens, table, 0, "identity"))
    return Corpus(folder)


def test_larger_than_memory_and_offsets_past_two_to_the_31(tmp_path):
    read = sparse(tmp_path)
    (batch,) = read.batches(begin=len(read) - 5)
    assert batch.lengths.tolist() == [1024] * 5
    assert batch.values[-5:].sum(1).tolist() == [0, 0, 128, 128, 128]


def test_no_documents_and_documents_without_tokens(tmp_path):
    empty = TokenBatch.from_list([torch.empty(0, 3)])
    queries = TokenBatch.from_list([torch.ones(2, 3)])
    read = write_corpus(tmp_path / "blank", [empty, empty], torch.float32)
    assert (len(read), read.tokens) == (2, 0)
    assert [x.tolist() for x in search(queries, read.batches(), 3)] == [[[0.0, 0.0]], [[0, 1]]]
    none = write_corpus(tmp_path / "none", [empty.select(torch.tensor([], dtype=torch.int64))])
    assert len(none) == 0 and list(none.batches()) == []


def test_what_is_not_a_corpus_is_refused(tmp_path):
    def interrupted():
        yield TokenBatch.from_list([torch.ones(2, 3)])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_corpus(tmp_path / "part", interrupted())
    for folder in ("part", "absent"):
        with pytest.raises(ValueError, match=f"Corpus: .*{folder} holds no complete corpus"):
            Corpus(tmp_path / folder)
    with pytest.raises(ValueError, match="write_corpus: .*part must be empty; choose another folder, or remove what"):
        write_corpus(tmp_path / "part", [])


@pytest.mark.parametrize(
    ("wrong", "error", "sentence"),
    [
        (TokenBatch.from_list([torch.ones(1, 2)]), TypeError, "as a list of TokenBatch, got one TokenBatch.$"),
        ([torch.ones(1, 1, 2)], TypeError, "each of batches must be a TokenBatch, got Tensor.$"),
        ([TokenBatch.from_list([torch.ones(1, d)]) for d in (2, 3)], ValueError, "all batches must have the same d"),
        ([], ValueError, "there must be at least one batch"),
        ([TokenBatch.from_list([torch.full((1, 2), 1e39, dtype=torch.float64)])], ValueError, "too large for"),
    ],
)
def test_after_a_wrong_call_the_right_one_writes(wrong, error, sentence, tmp_path):
    with pytest.raises(error, match=f"^write_corpus: .*{sentence}"):
        write_corpus(tmp_path / "new", wrong)
    assert len(write_corpus(tmp_path / "new", [TokenBatch.from_list([torch.ones(1, 2)])])) == 1


def test_bad_arguments_are_refused_before_anything_is_read(tmp_path):
    read = write_corpus(tmp_path / "new", grouped(documents(5), 5))
    with pytest.raises(ValueError, match="dtype must be one of .*, got torch.float64"):
        write_corpus(tmp_path / "other", grouped(documents(5), 5), torch.float64)
    with pytest.raises(ValueError, match="tokens_per_batch must be at least 1, got 0"):
        read.batches(tokens_per_batch=0)
    for begin, end in ((3, 2), (-1, 2), (0, 6)):
        with pytest.raises(ValueError, match=f"in order and from 0 to 5, got {begin} and {end}"):
            read.batches(begin=begin, end=end)


def test_no_part_is_loaded_before_its_slot_is_free():
    started = [threading.Event() for _ in range(8)]
    calls = []

    def load(part, marked):
        calls.append((part, marked))
        started[part].set()
        return part

    seen = []
    for part in reading.read_ahead(8, 3, load, lambda: f"after {seen[-1]}"):
        assert started[min(part + 2, 7)].wait(10)  # that many are loaded ahead
        assert not any(event.is_set() for event in started[part + 3 :])
        seen.append(part)
    assert seen == list(range(8)) and not readers()
    assert calls == [(n, None if n < 3 else f"after {n - 3}") for n in range(8)]


def test_an_error_while_loading_comes_in_its_turn():
    def load(part, marked):
        if part == 4:
            raise RuntimeError("out of memory")
        return part

    seen = []
    with pytest.raises(RuntimeError, match="out of memory"):
        seen.extend(reading.read_ahead(8, 3, load))
    assert seen == [0, 1, 2, 3] and not readers()


def test_nothing_is_loaded_any_more_once_the_caller_leaves():
    calls = []
    parts = reading.read_ahead(100, 3, lambda part, marked: calls.append(part))
    assert not readers()
    next(parts)
    assert readers()
    del parts
    assert not readers() and len(calls) <= 3


def test_nothing_holds_on_to_what_was_loaded():
    class Loaded:
        pass

    alive, before = weakref.WeakSet(), []

    def load(part, marked):
        before.append(len(alive))
        alive.add(loaded := Loaded())
        return loaded

    for loaded in reading.read_ahead(20, 2, load):
        del loaded
    assert max(before) <= 1  # with two slots


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("corpus-reader")]


def large(folder, count: int = 3000) -> tuple[Corpus, list[torch.Tensor]]:
    sequences = [tokens.to(torch.bfloat16) for tokens in documents(count, longest=150, d=128)]
    return write_corpus(folder / "new", grouped(sequences, 500)), sequences


@pytest.mark.cuda
@pytest.mark.parametrize("tokens", [1, 1000, 50_000, 1 << 20])
def test_streamed_equals_resident(tokens, tmp_path):
    read, sequences = large(tmp_path, 100 if tokens == 1 else 3000)
    queries = TokenBatch.from_list([each.to("cuda", torch.bfloat16) for each in documents(20, d=128, seed=1)])
    resident = TokenBatch.from_list([each.cuda() for each in sequences])
    streamed = search(queries, read.batches("cuda", tokens_per_batch=tokens), 100)
    assert all(map(torch.equal, streamed, search(queries, [resident], 100))) and not readers()


@pytest.mark.cuda
def test_kept_batches_stay_what_they_were(tmp_path):
    read, sequences = large(tmp_path)
    torch.cuda._sleep(10**8)  # everything below is queued while the stream is busy
    kept = list(read.batches("cuda", tokens_per_batch=10_000))
    assert len(kept) > 2 * reading.IN_FLIGHT
    assert torch.equal(torch.cat([batch.values for batch in kept]).cpu(), torch.cat(sequences))
    assert torch.cat([batch.lengths for batch in kept]).tolist() == [len(each) for each in sequences]


@pytest.mark.cuda
def test_a_slow_consumer_on_another_stream(tmp_path):
    read, _ = large(tmp_path)
    sums = []
    with torch.cuda.stream(torch.cuda.Stream()):
        for batch in read.batches("cuda", tokens_per_batch=10_000):
            torch.cuda._sleep(10**7)
            sums.append(batch.values.double().sum())
            del batch
    torch.cuda.synchronize()
    expected = [batch.values.double().sum() for batch in read.batches("cpu", tokens_per_batch=10_000)]
    assert [each.item() for each in sums] == [each.item() for each in expected]


@pytest.mark.cuda
def test_memory_is_bounded_where_the_gpu_is_slower_than_the_disk(tmp_path):
    read, _ = large(tmp_path, 8000)
    tokens = 50_000
    most = max(len(batch.values) for batch in read.batches(tokens_per_batch=tokens)) * 128 * 2
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    count = 0
    for batch in read.batches("cuda", tokens_per_batch=tokens):
        torch.cuda._sleep(10**7)
        count += len(batch)
    assert count == len(read)
    # Those in flight and the one that the loop still holds, rounded up to 1 MiB, out of 12; 1 MiB for what is small.
    assert torch.cuda.max_memory_allocated() - before <= (reading.IN_FLIGHT + 2) * (most + 2**20) + 2**20


@pytest.mark.cuda
def test_larger_than_memory_and_offsets_past_two_to_the_31_on_a_gpu(tmp_path):
    read = sparse(tmp_path)
    (batch,) = read.batches("cuda", begin=len(read) - 5)
    scores = maxsim(torch.ones(1, 1, 128, dtype=torch.bfloat16, device="cuda"), batch)
    assert scores.tolist() == [[0, 0, 0, 0, 128]]
