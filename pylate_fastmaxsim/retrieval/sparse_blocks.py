"""Sparse documents in blocks of a fixed size, and what searches the blocks: kernels on a GPU, SciPy on a CPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from pylate_fastmaxsim._checks import require_count
from pylate_fastmaxsim.cpu.sparse import PreparedQueries
from pylate_fastmaxsim.kernels.sparse import postings
from pylate_fastmaxsim.retrieval.topk import filled_up, merge_at
from pylate_fastmaxsim.sparse import LARGEST_OF_UINT16, SparseBatch


class Blocks(Protocol):
    """Blocks of documents that can be searched, on one device."""

    @property
    def nbytes(self) -> int: ...

    def set(self, block: int, offsets: Tensor, terms: Tensor, weights: Tensor, live: Tensor | None = None) -> None: ...

    def search(
        self, offsets: Tensor, terms: Tensor, weights: Tensor, k: int, at_least: Tensor | None = None
    ) -> tuple[Tensor, Tensor]: ...


class HostBlocks:
    """Blocks on the CPU."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._blocks: dict[int, tuple[SparseBatch, Tensor | None]] = {}

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block, _ in self._blocks.values())

    def set(self, block: int, offsets: Tensor, terms: Tensor, weights: Tensor, live: Tensor | None = None) -> None:
        self._blocks[block] = SparseBatch._trusted(offsets, terms, weights, self._vocabulary), live

    def search(
        self, offsets: Tensor, terms: Tensor, weights: Tensor, k: int, at_least: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        queries = PreparedQueries(SparseBatch._trusted(offsets, terms, weights, self._vocabulary))
        scores = torch.full((len(offsets) - 1, k), -1.0, device="cpu")
        positions = torch.full((len(offsets) - 1, k), -1, device="cpu")
        # A score that equals it counts.
        floor = None if at_least is None else at_least.nextafter(torch.full_like(at_least, -1))
        for number, (block, live) in sorted(self._blocks.items()):
            first = number * postings.DOCUMENTS_PER_BLOCK
            for rows, new, places in queries.candidates(block, live, scores[:, -1], floor):
                scores[rows], positions[rows] = merge_at(scores[rows], positions[rows], new, places + first, k)
        return filled_up(scores, positions)


def require_device(where: str, device: torch.device) -> None:
    """Raise ValueError unless sparse vectors can be searched on the device."""
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{where}: the device must be a CPU or a CUDA GPU, got {device}.")


def searchable(vocabulary: int, device: torch.device) -> Blocks:
    """An empty set of blocks on a device."""
    if device.type == "cpu":
        return HostBlocks(vocabulary)
    from pylate_fastmaxsim.kernels.sparse.launch import DeviceBlocks

    return DeviceBlocks(vocabulary, device)


def search_blocks(
    blocks: Blocks, queries: SparseBatch, k: int, first: int, at_least: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The best documents of blocks, the first of which begins at the position ``first``."""
    scores, positions = blocks.search(queries.offsets, queries.terms, queries.weights, k, at_least)
    return scores, torch.where(positions < 0, positions, positions + first) if first else positions


def require_queries(where: str, queries: object, k: object) -> int:
    """``k`` as an integer; TypeError or ValueError unless both are what a search takes."""
    if not isinstance(queries, SparseBatch):
        raise TypeError(f"{where}: queries must be a SparseBatch, got {type(queries).__name__}.")
    return require_count(where, "k", k)


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
        if not isinstance(batch, SparseBatch):
            raise TypeError(f"{where}: each of {name} must be a SparseBatch, got {type(batch).__name__}.")
        if batch.vocabulary != vocabulary:
            raise ValueError(f"{where}: {name} must have the vocabulary {vocabulary}, got {batch.vocabulary}.")
        dtype = dtype or batch.dtype
        if (batch.dtype, dtype) == (torch.float32, torch.float16):
            raise ValueError(
                f"{where}: float32 weights cannot follow float16 ones, to which they would be rounded; make the first "
                "batch float32, or this one float16."
            )
        batch = batch.to(device)
        term_dtype = torch.uint16 if vocabulary <= LARGEST_OF_UINT16 else torch.int32
        yield SparseBatch._trusted(batch.offsets, batch.terms.to(term_dtype), batch.weights.to(dtype), vocabulary)


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
