"""Exact MaxSim of the candidates of each query, and of nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from pylate_fastmaxsim.compressed import CompressedBatch
from pylate_fastmaxsim.ops.maxsim import maxsim
from pylate_fastmaxsim.tokens import TokenBatch

# Pairs of a query and a document that are scored in one call.
PAIRS_AT_ONCE = 1 << 20


def score_candidates(
    queries: TokenBatch,
    encoded: Callable[[np.ndarray], Iterator[TokenBatch | CompressedBatch]],
    candidates: np.ndarray,
    part: slice,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries, documents and scores ``[P]`` of the candidates ``[Nq, K]`` whose numbers lie in ``part``.

    ``encoded`` makes batches of documents by their numbers, which ascend. Documents that are no candidate are not asked
    for.
    """
    rows, columns = ((candidates >= part.start) & (candidates < part.stop)).nonzero()
    documents = candidates[rows, columns]
    order = documents.argsort(kind="stable")  # the queries of a document ascend
    rows, documents = rows[order], documents[order]
    used, places = np.unique(documents, return_inverse=True)
    scores = np.empty(len(rows), dtype=np.float32)
    begin = first = 0
    for batch in encoded(used):
        end = int(np.searchsorted(places, first + len(batch)))
        by_query = begin + rows[begin:end].argsort(kind="stable")
        scores[by_query] = pair_scores(queries, batch, rows[by_query], places[by_query] - first)
        begin, first = end, first + len(batch)
    return rows, documents, scores


def candidates_digest(candidates: np.ndarray) -> str:
    """The same for the same candidates."""
    return hashlib.blake2b(candidates.data, digest_size=16).hexdigest()


@torch.no_grad()
def pair_scores(
    queries: TokenBatch, documents: TokenBatch | CompressedBatch, rows: np.ndarray, places: np.ndarray
) -> np.ndarray:
    """MaxSim of pairs ``[P]`` of the query ``rows[p]`` and the document ``places[p]``; ``rows`` ascend.

    Examples
    --------
    >>> import numpy as np
    >>> import torch
    >>> from pylate_fastmaxsim import TokenBatch
    >>> from pylate_fastmaxsim.recipes.mining.candidates import pair_scores
    >>> queries = TokenBatch.from_list([torch.ones(1, 2), torch.eye(2)])
    >>> documents = TokenBatch.from_list([torch.ones(1, 2), 3 * torch.eye(2)])
    >>> pair_scores(queries, documents, np.array([0, 1, 1]), np.array([1, 0, 1])).tolist()
    [3.0, 2.0, 6.0]
    """
    asked, first, counts = np.unique(rows, return_index=True, return_counts=True)
    scores = np.empty(len(rows), dtype=np.float32)

    def on_device(numbers: np.ndarray) -> Tensor:
        return torch.from_numpy(numbers.astype(np.int64)).to(queries.device)

    # Queries with about as many candidates in one call; one that has fewer repeats its last.
    widths = 2 ** np.ceil(np.log2(counts)).astype(np.int64)
    for width in np.unique(widths):
        group, step = np.flatnonzero(widths == width), max(1, PAIRS_AT_ONCE // width)
        for begin in range(0, len(group), step):
            some = group[begin : begin + step]
            at = first[some, None] + np.minimum(np.arange(width), counts[some, None] - 1)
            found = maxsim(queries.select(on_device(asked[some])), documents, on_device(places[at]))
            scores[at] = found.cpu().numpy()
    return scores


def best_candidates(
    rows: np.ndarray, documents: np.ndarray, scores: np.ndarray, num_queries: int, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """Scores and documents of the ``k`` best pairs of each query, best first, ``[Nq, K]`` with K at most ``k``.

    Of equal scores the lower document comes first. Queries with fewer pairs have a score of -inf and a document of -1.

    Examples
    --------
    >>> import numpy as np
    >>> from pylate_fastmaxsim.recipes.mining.candidates import best_candidates
    >>> scores, found = best_candidates(np.array([1, 0, 1]), np.array([5, 7, 6]), np.array([1.0, 2.0, 3.0]), 2, k=9)
    >>> scores.tolist(), found.tolist()
    ([[2.0, -inf], [3.0, 1.0]], [[7, -1], [6, 5]])
    """
    order = np.lexsort((documents, -scores, rows))
    rows, documents, scores = rows[order], documents[order], scores[order]
    rank = np.arange(len(rows)) - np.searchsorted(rows, rows)
    kept = rank < k
    rows, documents, scores, rank = rows[kept], documents[kept], scores[kept], rank[kept]
    shape = (num_queries, rank.max(initial=-1) + 1)
    best, found = np.full(shape, -np.inf, dtype=np.float32), np.full(shape, -1, dtype=np.int64)
    best[rows, rank], found[rows, rank] = scores, documents
    return best, found
