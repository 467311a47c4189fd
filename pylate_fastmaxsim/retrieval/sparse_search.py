"""Exact search over a stream of sparse documents, of which no index is kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from pylate_fastmaxsim.kernels.sparse import postings
from pylate_fastmaxsim.retrieval.checks import require_batches
from pylate_fastmaxsim.retrieval.sparse_blocks import (
    in_blocks,
    require_device,
    require_fitting,
    require_queries,
    search_blocks,
    searchable,
)
from pylate_fastmaxsim.retrieval.topk import merge_results
from pylate_fastmaxsim.sparse import SparseBatch

# Entries of documents that are held at once: 192 MiB as uint16 terms and float32 weights, and on a GPU up to 112 MiB of
# postings.
ENTRIES_HELD = 1 << 25


@torch.no_grad()
def sparse_search(queries: SparseBatch, documents: Iterable[SparseBatch], k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` documents of each query with the largest inner product, found without an index.

    Reads the documents once and keeps only the best, so there may be any number of them. For several searches in the same
    documents build a :class:`pylate_fastmaxsim.SparseIndex`. Results are the same bits on any device and for any batches.

    Parameters
    ----------
    queries
        Nq queries, on the device that searches: a CPU or a CUDA GPU.
    documents
        Batches over the vocabulary of the queries, on any device, all of one dtype or float16 behind float32; they may
        come from a generator.
    k
        Number of documents to return for each query, at least 1.

    Returns
    -------
    scores
        Inner products, best first, ``[Nq, min(k, Nd)]`` for Nd documents in all, float32: sums in float64, rounded once.
        0 where fewer documents share a term with the query.
    positions
        Which document each score is of, counted through all batches, ``[Nq, min(k, Nd)]``, int64; -1 where there is
        none. Of equal scores the lower position comes first.

    Raises
    ------
    ValueError
        ``k`` is below 1, vocabularies differ, float32 weights follow float16 ones, or the device is another.
    TypeError
        ``k`` is no integer, ``queries`` is no ``SparseBatch``, ``documents`` are no batches.

    Examples
    --------
    >>> from pylate_fastmaxsim import SparseBatch, sparse_search
    >>> queries = SparseBatch.from_lists([[(0, 1.0), (2, 0.5)]], vocabulary=3)
    >>> batches = (SparseBatch.from_lists([[(1, 1.0)], [(2, size)]], vocabulary=3) for size in (2.0, 4.0))
    >>> sparse_search(queries, batches, k=3)
    (tensor([[2., 1., 0.]]), tensor([[ 3,  1, -1]]))
    """
    k = require_queries("sparse_search", queries, k)
    require_batches("sparse_search", "documents", documents, SparseBatch)
    require_device("sparse_search", queries.device)
    scores = torch.zeros(len(queries), 0, device=queries.device)
    positions = torch.zeros(len(queries), 0, dtype=torch.int64, device=queries.device)
    first = 0
    batches = require_fitting("sparse_search", "documents", documents, queries.device, queries.vocabulary)
    for stretch in _stretches(in_blocks(batches)):
        # What does not reach the worst of k need not be found. At first nothing is known, and a GPU looks at a sample.
        at_least = scores[:, -1] if scores.shape[1] == k else None
        found = _search(queries, stretch, min(k, sum(map(len, stretch))), first, at_least)
        scores, positions = merge_results([(scores, positions), found], k)
        first += len(stretch) * postings.DOCUMENTS_PER_BLOCK
        stretch.clear()
    return scores, positions


def _search(
    queries: SparseBatch, stretch: list[SparseBatch], k: int, first: int, at_least: Tensor | None
) -> tuple[Tensor, Tensor]:
    blocks = searchable(queries.vocabulary, queries.device)
    for number, block in enumerate(stretch):
        blocks.set(number, block.offsets, block.terms, block.weights)
    return search_blocks(blocks, queries, k, first, at_least)


def _stretches(blocks: Iterable[SparseBatch]) -> Iterator[list[SparseBatch]]:
    """Blocks in lists of about ``ENTRIES_HELD`` entries. A list may be emptied when it is searched."""
    held: list[SparseBatch] = []
    entries = 0
    for block in blocks:
        held.append(block)
        entries += len(block.terms)
        if entries >= ENTRIES_HELD:
            yield held
            held, entries = [], 0
    if held:
        yield held
