"""Exact search over a streamed corpus: all documents are scored, and each query's best stay on the device."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from pylate_fastmaxsim._checks import require_count
from pylate_fastmaxsim._dtypes import sum_dtype
from pylate_fastmaxsim.ops.pooled import Max, Pooling, pooled_scores
from pylate_fastmaxsim.retrieval.checks import require_batches
from pylate_fastmaxsim.retrieval.topk import merge
from pylate_fastmaxsim.tokens import TokenBatch

# Scores of one batch of documents that are computed at once, 256 MiB of float32; more queries are scored in turn. With
# the copies, positions and keys of a merge that is 2.3 GiB.
SCORES_AT_ONCE = 1 << 26


@torch.no_grad()
def search(
    queries: TokenBatch, documents: Iterable[TokenBatch], k: int, *, pooling: Pooling = Max()
) -> tuple[Tensor, Tensor]:
    """The ``k`` documents of each query with the highest MaxSim or pooled score, found without an index.

    Takes one batch of documents at a time and keeps only the best scores, so the corpus may have any size. The larger
    the batches, the better they fill a GPU. Of equal scores the earlier document comes first.

    Parameters
    ----------
    queries
        Nq queries, on the device that scores.
    documents
        Batches of documents, each of the d, dtype and device of the queries; they may come from a generator.
    k
        Number of documents to return for each query, at least 1.
    pooling
        As in :func:`pylate_fastmaxsim.pooled_scores`.

    Returns
    -------
    scores
        Best first, ``[Nq, min(k, Nd)]`` for Nd documents in all, float32 (float64 for float64 input). A NaN comes
        before every number.
    positions
        Which document each score is of, counted through all batches, ``[Nq, min(k, Nd)]``, int64.

    Raises
    ------
    ValueError
        ``k`` is below 1, or a batch does not fit the queries (see :func:`pylate_fastmaxsim.maxsim`).
    TypeError
        ``k`` is no integer, ``pooling`` is not one, queries are no ``TokenBatch``, documents are one batch and not several, or something in
        them is no ``TokenBatch``.

    Examples
    --------
    >>> import torch
    >>> from pylate_fastmaxsim import TokenBatch
    >>> from pylate_fastmaxsim.retrieval.search import search
    >>> queries = TokenBatch.from_list([torch.eye(2)])
    >>> batches = (TokenBatch.from_list([size * torch.eye(2), torch.eye(2)]) for size in (2.0, 3.0))
    >>> search(queries, batches, k=2)
    (tensor([[6., 4.]]), tensor([[2, 0]]))
    """
    k = require_count("search", "k", k)
    if not isinstance(queries, TokenBatch):
        raise TypeError(f"search: queries must be a TokenBatch, got {type(queries).__name__}.")
    require_batches("search", "documents", documents)
    scores = torch.empty(len(queries), 0, dtype=sum_dtype(queries.values.dtype), device=queries.device)
    positions = torch.empty(len(queries), 0, dtype=torch.int64, device=queries.device)
    seen = 0
    for batch in documents:
        if not isinstance(batch, TokenBatch):
            raise TypeError(f"search: each of documents must be a TokenBatch, got {type(batch).__name__}.")
        if len(batch) == 0:
            continue
        rows = torch.arange(len(queries), device=queries.device).split(max(1, SCORES_AT_ONCE // len(batch)))
        merged = [
            merge(scores[part], positions[part], pooled_scores(queries.select(part), batch, pooling=pooling), seen, k)
            for part in rows
        ]
        scores, positions = (torch.cat(parts) for parts in zip(*merged, strict=True))
        seen += len(batch)
    return scores, positions
