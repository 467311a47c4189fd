import threading
import time
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
def test_each_thread_gets_its_own_result_or_error_also_while_it_closes(backend):
    function, queries, wrong = backend()
    queries, ks, calls = [*queries, wrong], [1 + n % 4 for n in range(17)], []
    one_runs, all_wait = threading.Event(), threading.Event()

    def gathered(batch, k):
        calls.append(len(batch))
        one_runs.set()
        while len(calls) == 1 and searcher._waiting.qsize() < 16:
            time.sleep(0.001)
        all_wait.set()
        return call(function, batch, k)

    with ThreadPoolExecutor(17) as threads:
        with BatchingSearcher(gathered, max_batch=12) as searcher:
            found = []
            for query, k in zip(queries, ks, strict=True):
                found.append(threads.submit(searcher.search, query, k))
                one_runs.wait()
            all_wait.wait()
        assert calls[:2] == [1, 12]
    for query, k, result in zip(queries[:-1], ks, found, strict=False):
        alone = call(function, query if isinstance(query, SparseBatch) else [query], k)
        alone = alone[0] if backend is exact else tuple(each[0] for each in alone)
        assert str(result.result()) == str(alone)
    with pytest.raises(ValueError):
        found[-1].result()
    for k, error in ((1, RuntimeError), (0, ValueError)):
        with pytest.raises(error):
            searcher.search(queries[0], k)
