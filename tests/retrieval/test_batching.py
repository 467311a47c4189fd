import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from pylate_fastmaxsim import SparseBatch, SparseIndex
from pylate_fastmaxsim.indexes import Exact
from pylate_fastmaxsim.retrieval.batching import BatchingSearcher
from pylate_fastmaxsim.retrieval.search import search

DOCUMENTS = [torch.rand(3, 4) for _ in range(9)]
QUERIES = [torch.rand(2, 4) for _ in range(16)]


def sparse():
    index = SparseIndex.build(torch.stack([each[0] for each in DOCUMENTS]))
    return (
        index.search,
        [SparseBatch.from_torch(each[:1]) for each in QUERIES],
        SparseBatch.from_torch(torch.ones(1, 3)),
    )


def late():
    return partial(search, documents=DOCUMENTS), QUERIES, torch.rand(2, 3)


def exact():
    index = Exact(device="cpu").add_documents([*range(9)], DOCUMENTS)
    return index, QUERIES, torch.rand(2, 3)


def call(function, queries, k):
    return function(queries, k=k) if isinstance(function, (partial, Exact)) else function(queries, k)


@pytest.mark.parametrize("backend", [sparse, late, exact])
def test_each_thread_gets_its_own_result_or_error(backend):
    function, queries, wrong = backend()
    queries, ks, entered, begun, calls = [*queries, wrong], [1 + n % 4 for n in range(17)], [], threading.Event(), []

    def gathered(batch, k):
        calls.append(len(batch))
        begun.set()
        while len(calls) == 1 and len(entered) < 17:  # the first call ends when all have asked
            pass
        return call(function, batch, k)

    def ask(query, k):
        entered.append(query)
        try:
            return searcher.search(query, k)
        except ValueError as error:
            return error

    with BatchingSearcher(gathered, max_batch=12) as searcher, ThreadPoolExecutor(17) as threads:
        first = threads.submit(ask, queries[0], ks[0])
        begun.wait()
        others = [threads.submit(ask, query, k) for query, k in zip(queries[1:], ks[1:], strict=True)]
        found = [each.result() for each in (first, *others)]
    assert calls[0] == 1 and max(calls) > 4 and max(calls) <= 12
    for query, k, result in zip(queries[:-1], ks, found, strict=False):
        alone = call(function, query if isinstance(query, SparseBatch) else [query], k)
        alone = alone[0] if backend is exact else tuple(each[0] for each in alone)
        assert str(result) == str(alone)
    assert isinstance(found[-1], ValueError)
    with pytest.raises(RuntimeError, match="the searcher is closed"):
        searcher.search(queries[0], 1)
    searcher.close()


def test_queries_that_wait_when_it_closes_are_answered_and_a_bad_k_is_refused():
    release, begun = threading.Event(), threading.Event()

    def slow(batch, k):
        begun.set()
        release.wait()
        return [[query] for query in batch]

    searcher = BatchingSearcher(slow, window=10)  # nobody waits for more than were there before
    with ThreadPoolExecutor(4) as threads:
        found = [threads.submit(searcher.search, n, 1) for n in range(3)]
        begun.wait()
        closing = threads.submit(searcher.close)
        release.set()
        closing.result()
        assert [each.result() for each in found] == [[0], [1], [2]]
    with pytest.raises(ValueError, match="k must be at least 1"):
        searcher.search(0, 0)
