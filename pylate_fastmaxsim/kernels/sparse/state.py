"""What a search on a GPU holds beside the index: the queries, and for each of them a threshold and candidates."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Integer sums stay below LARGEST, so that they fit in 31 bits, and fall into BINS bins of 2**BIN_SHIFT.
LARGEST = 1 << 30
BINS = 2048
BIN_SHIFT = 19


class Tables(NamedTuple):
    """The address of an array of each block, int64 ``[blocks]``, on the device. An address of 0 stands for "all live"."""

    ids: Tensor
    impacts: Tensor
    starts: Tensor
    scales: Tensor
    live: Tensor
    row_offsets: Tensor
    row_terms: Tensor
    row_weights: Tensor


class Queries(NamedTuple):
    """Sparse vectors back to back: int64 ``[Nq + 1]``, int32 and float32 ``[P]``."""

    offsets: Tensor
    terms: Tensor
    weights: Tensor

    def __len__(self) -> int:
        return self.offsets.numel() - 1


class State(NamedTuple):
    """Of each query, on the device; see `search.cu` for what they mean."""

    units: Tensor  # [Nq] float64
    margins: Tensor  # [Nq] int32
    thresholds: Tensor  # [Nq] int32
    counts: Tensor  # [Nq] int32
    lost: Tensor  # [Nq] int32
    histograms: Tensor  # [Nq, BINS] int32
    candidates: Tensor  # [Nq, capacity] int64
    summary: Tensor  # [2] int32

    @property
    def capacity(self) -> int:
        return self.candidates.shape[1]

    @classmethod
    def of(cls, count: int, capacity: int, device: torch.device) -> State:
        """To be filled in by an engine's ``prepare``."""
        # Few allocations, since the host takes as long as the GPU for small searches.
        numbers = torch.empty(4 * count + 2, dtype=torch.int32, device=device)
        return cls(
            torch.empty(count, dtype=torch.float64, device=device),
            *numbers[: 4 * count].view(4, count),
            torch.empty(count, BINS, dtype=torch.int32, device=device),
            torch.empty(count, capacity, dtype=torch.int64, device=device),
            numbers[4 * count :],
        )

    @staticmethod
    def bytes_of_query(capacity: int) -> int:
        # Part of the candidates twice: topk copies those that are left.
        return 4 * BINS + 12 * capacity
