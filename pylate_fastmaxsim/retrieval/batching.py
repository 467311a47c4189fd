"""Dynamic batching for a server: queries of many threads, searched together."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from pylate_fastmaxsim._checks import require_count
from pylate_fastmaxsim.sparse import SparseBatch


class _Asked:
    """A query of one thread, which waits for ``done``."""

    __slots__ = ("done", "error", "k", "query", "result")

    def __init__(self, query: Any, k: int) -> None:
        self.query, self.k, self.result, self.error = query, k, None, None
        self.done = threading.Lock()
        self.done.acquire()


class BatchingSearcher:
    """Gathers the single queries of many threads and searches them in one call, as a GPU is used well.

    A thread of its own searches. While it does, queries wait; then it searches all that wait.

    Parameters
    ----------
    search
        Called with a list of queries and the largest k of them. Returns scores and positions, ``[Nq, k]`` each, as
        ``SparseIndex.search`` and :func:`pylate_fastmaxsim.retrieval.search.search` do, or a list of results for each
        query, best first, as ``indexes.Exact``. If all queries are a ``SparseBatch``, they come as one.
    window
        Seconds to wait for more where fewer queries wait than its last batch had; a single client never waits.
    max_batch
        The largest number of queries of a call.

    Examples
    --------
    >>> from concurrent.futures import ThreadPoolExecutor
    >>> from pylate_fastmaxsim import SparseBatch, SparseIndex
    >>> from pylate_fastmaxsim.retrieval.batching import BatchingSearcher
    >>> documents = SparseBatch.from_lists([[(0, 2.0)], [(1, 1.0)]], vocabulary=2)
    >>> index = SparseIndex.build(documents)
    >>> queries = [SparseBatch.from_lists([[(term, 1.0)]], vocabulary=2) for term in (0, 1)]
    >>> with BatchingSearcher(index.search) as searcher, ThreadPoolExecutor() as threads:
    ...     [scores.tolist() for scores, _ in threads.map(searcher.search, queries, [1, 1])]
    [[2.0], [1.0]]
    """

    def __init__(self, search: Callable[[Any, int], Any], *, window: float = 0.0, max_batch: int = 1024) -> None:
        self._function, self.window = search, window
        self.max_batch = require_count("BatchingSearcher", "max_batch", max_batch)
        self._waiting: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self._usual, self._closed, self._lock = 1, False, threading.Lock()
        self._thread = threading.Thread(target=self._serve, name="BatchingSearcher", daemon=True)
        self._thread.start()

    def search(self, query: Any, k: int) -> Any:
        """The ``k`` best documents of one query: scores and positions ``[k]`` on the CPU, or a list.

        Raises what the search raises for this query, ValueError or TypeError if ``k`` is no integer of at least 1, and
        RuntimeError once the searcher is closed.
        """
        asked = _Asked(query, require_count("BatchingSearcher.search", "k", k))
        with self._lock:  # nothing comes behind the end
            if self._closed:
                raise RuntimeError("BatchingSearcher.search: the searcher is closed.")
            self._waiting.put(asked)
        asked.done.acquire()
        if asked.error is not None:
            raise asked.error
        return asked.result

    def close(self) -> None:
        """Answer the queries that wait, and end the thread. Later queries are refused."""
        with self._lock:
            self._closed = True
            self._waiting.put(None)
        self._thread.join()

    def __enter__(self) -> BatchingSearcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> None:
        open_ = True
        while open_:
            batch, ends = [self._waiting.get()], time.monotonic() + self.window
            while batch[-1] is not None and len(batch) < self.max_batch:
                left = ends - time.monotonic()
                try:
                    batch.append(self._waiting.get(len(batch) < self._usual and left > 0, max(left, 0)))
                except queue.Empty:
                    break
            if batch[-1] is None:
                batch, open_ = batch[:-1], False
            if batch:
                self._answer(batch)
            self._usual = len(batch)

    def _answer(self, batch: list[_Asked]) -> None:
        """Search a batch; if that fails, each query alone, so that only a wrong one gets the error."""
        queries = [each.query for each in batch]
        try:
            if all(isinstance(each, SparseBatch) and len(each) == 1 for each in queries):
                queries = SparseBatch.concatenate(queries)
            found = self._function(queries, max(each.k for each in batch))
            if isinstance(found, tuple):
                found = zip(*(each.cpu().unbind() for each in found), strict=True)
            for asked, result in zip(batch, found, strict=True):
                cut = tuple(each[: asked.k] for each in result) if isinstance(result, tuple) else result[: asked.k]
                asked.result = cut
        except Exception as error:  # noqa: BLE001 - is raised where the query was asked
            if len(batch) > 1:
                for asked in batch:
                    self._answer([asked])
                return
            batch[0].error = error
        for asked in batch:
            asked.done.release()
