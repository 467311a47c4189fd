"""The steps of a sparse search as CUDA C++ (`search.cu`): integer adds into shared memory, which Triton does not have.

And what a search holds beside the index: the queries, and for each of them a threshold and candidates.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from pylate_fastmaxsim.kernels.sparse.postings import DOCUMENTS_PER_BLOCK

SOURCE = Path(__file__).with_name("search.cu")
# Of a CTA that scans: three of them fit on a multiprocessor of an H100, by shared memory and by registers.
THREADS = 512
# Candidates that a warp of rescore takes.
CANDIDATES_PER_WARP = 8
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
    """State of a search of some queries, on the device; `search.cu` says what each tensor means."""

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


def definitions(documents: int = DOCUMENTS_PER_BLOCK, threads: int = THREADS) -> dict[str, int | float]:
    return {"DOCUMENTS": documents, "THREADS": threads, "BINS": BINS, "BIN_SHIFT": BIN_SHIFT, "LARGEST": float(LARGEST)}


class CudaEngine:
    """Launches the kernels of `search.cu`. ``kernels`` compiles and runs them (:class:`runtime.nvrtc.CudaKernels`)."""

    def __init__(self, kernels, documents: int = DOCUMENTS_PER_BLOCK, threads: int = THREADS):
        self._launch = kernels.launch
        self._documents = documents
        self._threads = threads

    def prepare(self, queries: Queries, top_scales: Tensor, at_least: Tensor | None, state: State) -> None:
        self._launch(
            "prepare_queries", (len(queries), 1), 128,
            [*queries, top_scales, at_least, state.units, state.margins, state.thresholds, state.counts, state.lost,
             state.histograms, state.summary],
        )  # fmt: skip

    def count(self, tables: Tables, blocks: Tensor, queries: Queries, chosen: Tensor, state: State) -> None:
        self._walk("count_blocks", [], tables, blocks, queries, chosen, state)

    def scan(self, tables: Tables, blocks: Tensor, queries: Queries, chosen: Tensor, state: State) -> None:
        more = [state.counts, state.candidates, state.capacity]
        self._walk("scan_blocks", more, tables, blocks, queries, chosen, state)

    def _walk(
        self, name: str, more: list, tables: Tables, blocks: Tensor, queries: Queries, chosen: Tensor, state: State
    ) -> None:
        arguments = [
            *tables[:5], blocks, chosen, chosen.numel(), *queries, state.units, state.thresholds, state.histograms, *more
        ]  # fmt: skip
        grid = (blocks.numel() * chosen.numel(), 1)
        self._launch(name, grid, self._threads, arguments, shared_bytes=4 * self._documents)

    def raise_thresholds(self, chosen: Tensor, state: State, k: int, restart: bool = False) -> None:
        self._launch(
            "raise_thresholds", (chosen.numel(), 1), 1024,
            [chosen, state.histograms, state.units, state.margins, state.thresholds, state.counts, state.candidates,
             state.lost, state.summary, state.capacity, k, int(restart)],
        )  # fmt: skip

    def rescore(
        self, tables: Tables, queries: Queries, chosen: Tensor, state: State, width: int, wide: tuple[bool, bool]
    ) -> None:
        grid = (-(-width // (8 * CANDIDATES_PER_WARP)), chosen.numel())
        self._launch(
            "rescore", grid, 256,
            [chosen, *queries, *tables[5:], state.counts, state.candidates, state.capacity, width, *map(int, wide)],
        )  # fmt: skip

    def unpack(self, keys: Tensor, k: int) -> tuple[Tensor, Tensor]:
        count, width = keys.shape
        scores = torch.empty(count, k, device=keys.device)
        positions = torch.empty(count, k, dtype=torch.int64, device=keys.device)
        self._launch("unpack", (-(-count * k // 256), 1), 256, [keys, scores, positions, width, k, count])
        return scores, positions
