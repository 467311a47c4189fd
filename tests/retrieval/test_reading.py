import threading
import weakref

import pytest
import torch

from pylate_fastmaxsim.retrieval.corpus import Corpus, write_corpus
from pylate_fastmaxsim.retrieval.formats import reading
from tests.support.corpora import FORMATS, documents, grouped, unit_documents, vectors


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
@pytest.mark.parametrize("tokens", [1, 1000, 1 << 20])
@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_streamed_to_a_gpu_equals_what_is_on_disk(format, tokens, tmp_path):
    sequences = unit_documents(2000 if tokens > 1 else 50)
    write_corpus(tmp_path, grouped(sequences[::2], 100), format=format, rank=(0, 2))
    write_corpus(tmp_path, grouped(sequences[1::2], 100), format=format, rank=(1, 2))
    read = Corpus(tmp_path)
    assert vectors(read.batches("cuda", tokens_per_batch=tokens)) == vectors(read.batches())
    chosen = torch.tensor([40, 3, 49, 0])
    assert vectors([read.select(chosen, "cuda")]) == vectors([read.select(chosen)])
