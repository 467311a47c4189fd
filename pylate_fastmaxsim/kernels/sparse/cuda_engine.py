"""The steps of a sparse search as CUDA C++ (`search.cu`): integer adds into shared memory, which Triton does not have."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from pylate_fastmaxsim.kernels.sparse.postings import DOCUMENTS_PER_BLOCK
from pylate_fastmaxsim.kernels.sparse.state import BIN_SHIFT, BINS, LARGEST, Queries, State, Tables

SOURCE = Path(__file__).with_name("search.cu")
# Of a CTA that scans: three of them fit on a multiprocessor of an H100, by shared memory and by registers.
THREADS = 512
# Candidates that a warp of rescore takes.
CANDIDATES_PER_WARP = 8


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
