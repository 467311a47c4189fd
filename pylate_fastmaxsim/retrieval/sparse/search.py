"""Exact search of sparse documents in blocks of a fixed size: by kernels on a GPU, by NumPy on a CPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pylate_fastmaxsim._checks import require_count
from pylate_fastmaxsim.cpu.sparse import Postings, best
from pylate_fastmaxsim.kernels.sparse import postings
from pylate_fastmaxsim.retrieval.topk import merge_results
from pylate_fastmaxsim.sparse import SparseBatch, SparseVectors, as_sparse_batch, sparse_batches, term_dtype

if TYPE_CHECKING:
    from pylate_fastmaxsim.kernels.sparse.launch import DeviceBlocks

# Entries of documents that are held at once: 192 MiB as uint16 terms and float32 weights, and on a GPU up to 112 MiB of
# postings.
ENTRIES_HELD = 1 << 25


@torch.no_grad()
def sparse_search(
    queries: SparseVectors, documents: SparseVectors | Iterable[SparseVectors], k: int
) -> tuple[Tensor, Tensor]:
    """The ``k`` documents of each query with the largest inner product, found without an index.

    Reads the documents once and keeps only the best, so there may be any number of them. For several searches in the same
    documents build a :class:`pylate_fastmaxsim.SparseIndex`. Results are the same bits on any device and for any batches.

    Parameters
    ----------
    queries
        Nq queries, on the device that searches, a CPU or a CUDA GPU: a ``SparseBatch``, or what its ``from_torch`` or
        ``from_scipy`` takes, as the tensor that ``encode`` of a SparseEncoder returns, or a list of vectors.
    documents
        Documents in any such form, or batches of these, which may come from a generator; over the vocabulary of the
        queries, on any device, all of one dtype or float16 behind float32.
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
        ``k`` is no integer, or ``queries`` or something in ``documents`` is none of these.

    Examples
    --------
    >>> from pylate_fastmaxsim import SparseBatch, sparse_search
    >>> queries = SparseBatch.from_lists([[(0, 1.0), (2, 0.5)]], vocabulary=3)
    >>> batches = (SparseBatch.from_lists([[(1, 1.0)], [(2, size)]], vocabulary=3) for size in (2.0, 4.0))
    >>> sparse_search(queries, batches, k=3)
    (tensor([[2., 1., 0.]]), tensor([[ 3,  1, -1]]))
    """
    queries, k = as_sparse_batch("sparse_search", "queries", queries), require_count("sparse_search", "k", k)
    batches = sparse_batches("sparse_search", "documents", documents)
    require_device("sparse_search", queries.device)
    scores = torch.zeros(len(queries), 0, device=queries.device)
    positions = torch.zeros(len(queries), 0, dtype=torch.int64, device=queries.device)
    first = 0
    batches = require_fitting("sparse_search", "documents", batches, queries.device, queries.vocabulary)
    for stretch in _stretches(in_blocks(batches)):
        # What does not reach the worst of k need not be found. At first nothing is known, and a GPU looks at a sample.
        at_least = scores[:, -1] if scores.shape[1] == k else None
        blocks = searchable(queries.vocabulary, queries.device)
        for number, block in enumerate(stretch):
            blocks.set(number, block.offsets, block.terms, block.weights)
        found = search_blocks(blocks, queries, min(k, sum(map(len, stretch))), first, at_least)
        scores, positions = merge_results([(scores, positions), found], k)
        first += len(stretch) * postings.DOCUMENTS_PER_BLOCK
        stretch.clear()
        del blocks, block
    return scores, positions


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


class HostBlocks:
    """Blocks on the CPU. One that is searched again is sorted by term, for all searches that follow."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._blocks: dict[int, tuple[SparseBatch, Tensor | None]] = {}
        self._postings: dict[int, Postings | None] = {}  # None: of a block that was searched once

    @property
    def nbytes(self) -> int:
        blocks = (block for block, _ in self._blocks.values())
        return sum(each.nbytes for each in (*blocks, *filter(None, self._postings.values())))

    def set(self, block: int, offsets: Tensor, terms: Tensor, weights: Tensor, live: Tensor | None = None) -> None:
        held = self._blocks.get(block)
        if held is not None and held[0].terms is not terms:  # else only `live` is new
            self._postings.pop(block, None)
        self._blocks[block] = SparseBatch._trusted(offsets, terms, weights, self._vocabulary), live

    def search(
        self, offsets: Tensor, terms: Tensor, weights: Tensor, k: int, at_least: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        asked, factors, wanted = terms.numpy(), weights.numpy(), np.unique(terms.numpy())
        blocks = [
            (
                number * postings.DOCUMENTS_PER_BLOCK,
                self._sorted(number, wanted),
                live if live is None else live.numpy(),
            )
            for number, (_, live) in self._blocks.items()
        ]
        scores = torch.zeros(len(offsets) - 1, k, device="cpu")
        positions = torch.full((len(offsets) - 1, k), -1, device="cpu")
        for row, (begin, end) in enumerate(pairwise(offsets.tolist())):
            # A score that equals it counts.
            above = -1.0 if at_least is None else np.nextafter(at_least[row].numpy(), np.float32(-1))
            found = best(blocks, asked[begin:end], factors[begin:end], k, above)
            for result, values in zip((scores, positions), found, strict=True):
                result[row, : len(values)] = torch.from_numpy(values)
        return scores, positions

    def _sorted(self, number: int, wanted: np.ndarray) -> Postings:
        block = self._blocks[number][0]
        if number not in self._postings:
            self._postings[number] = None
            return Postings(block, wanted)
        found = self._postings[number] = self._postings[number] or Postings(block)
        return found


def require_device(where: str, device: torch.device) -> None:
    """Raise ValueError unless sparse vectors can be searched on the device."""
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{where}: the device must be a CPU or a CUDA GPU, got {device}.")


def searchable(vocabulary: int, device: torch.device) -> HostBlocks | DeviceBlocks:
    """An empty set of blocks on a device."""
    if device.type == "cpu":
        return HostBlocks(vocabulary)
    from pylate_fastmaxsim.kernels.sparse.launch import DeviceBlocks

    return DeviceBlocks(vocabulary, device)


def search_blocks(
    blocks: HostBlocks | DeviceBlocks, queries: SparseBatch, k: int, first: int = 0, at_least: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The best documents of blocks, the first of which begins at the position ``first``."""
    scores, positions = blocks.search(queries.offsets, queries.terms, queries.weights, k, at_least)
    return scores, torch.where(positions < 0, positions, positions + first) if first else positions


def require_fitting(
    where: str,
    name: str,
    batches: Iterable[SparseBatch],
    device: torch.device,
    vocabulary: int,
    dtype: torch.dtype | None = None,
) -> Iterator[SparseBatch]:
    """The batches of the argument ``name`` on a device, all of one dtype; by default that of the first.

    float16 weights become float32 where the others are. The opposite is a ValueError, as is another vocabulary.
    """
    for batch in batches:
        if batch.vocabulary != vocabulary:
            raise ValueError(f"{where}: {name} must have the vocabulary {vocabulary}, got {batch.vocabulary}.")
        dtype = dtype or batch.dtype
        if (batch.dtype, dtype) == (torch.float32, torch.float16):
            raise ValueError(
                f"{where}: float32 weights cannot follow float16 ones, to which they would be rounded; make the first "
                "batch float32, or this one float16."
            )
        batch = batch.to(device)
        terms = batch.terms.to(term_dtype(vocabulary))
        yield SparseBatch._trusted(batch.offsets, terms, batch.weights.to(dtype), vocabulary)


def in_blocks(batches: Iterable[SparseBatch], begun: SparseBatch | None = None) -> Iterator[SparseBatch]:
    """The documents of batches in blocks of ``DOCUMENTS_PER_BLOCK``, all full but the last. Blocks are copies.

    ``begun`` is a block that is not full, whose documents come first.
    """
    parts = [] if begun is None else [begun]
    held = sum(map(len, parts))
    for batch in batches:
        begin = 0
        while begin < len(batch):
            end = min(len(batch), begin + postings.DOCUMENTS_PER_BLOCK - held)
            parts.append(_documents(batch, begin, end))
            held, begin = held + end - begin, end
            if held == postings.DOCUMENTS_PER_BLOCK:
                yield SparseBatch.concatenate(parts)
                parts, held = [], 0
    if parts and parts[-1] is not begun:
        yield SparseBatch.concatenate(parts)


def _documents(batch: SparseBatch, begin: int, end: int) -> SparseBatch:
    """Documents from ``begin`` to before ``end``, without a copy of their entries."""
    offsets = batch.offsets[begin : end + 1]
    entries = slice(int(offsets[0]), int(offsets[-1]))
    return SparseBatch._trusted(offsets - offsets[0], batch.terms[entries], batch.weights[entries], batch.vocabulary)
