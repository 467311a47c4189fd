"""Which tile configurations are worth a measurement, and how the best is found among them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from pylate_fastmaxsim.kernels.runtime.arch import next_power_of_2

# Every field that is varied, for the forward of MaxSim and each family of kernels of its gradients. Other fields keep the
# value of the table.
CANDIDATES: dict[str, dict[str, tuple[Any, ...]]] = {
    "forward": {
        "block_m": (16, 32, 64, 128, 256),
        "block_n": (32, 64, 128),
        "block_k": (16, 32, 64, 128, 256),
        "num_warps": (4, 8),
        "num_stages": (2, 3, 4),
        "documents_per_program": (1, 2, 4, 8),
        "max_registers": (None, 255),
    },
    "query_gradient": {
        "block_rows": (1, 2, 4, 8, 16),
        "block_d": (32, 64, 128, 256),
        "unroll": (2, 4, 8, 16),
        "num_warps": (1, 2, 4),
    },
    "document_gradient": {
        "block_t": (16, 32, 64, 128),
        "block_r": (16, 32, 64, 128),
        "block_d": (32, 64, 128, 256),
        "rows_of_scan": (512, 1024, 2048, 4096),
        "scan_warps": (1, 2, 4, 8),
        "num_warps": (1, 2, 4, 8),
        "num_stages": (2, 3, 4),
    },
    "candidate_gradient": {
        "block_t": (16, 32, 64, 128),
        "block_r": (16, 32, 64, 128),
        "block_d": (32, 64, 128, 256),
        "num_warps": (1, 2, 4, 8),
        "num_stages": (1, 2, 3),
        "max_registers": (None, 255),
    },
}
# Tiles of a token vector: larger ones than the vector only add idle lanes.
SPAN_D = ("block_k", "block_d")

# A configuration replaces another only if it is clearly faster, so that noise chooses nothing.
FASTER = 0.98


class TuningError(Exception):
    """Why there is nothing to choose from, in one sentence."""


@dataclass(frozen=True)
class Measured:
    """Milliseconds of one configuration at each shape, or the reason why it is out."""

    tiles: NamedTuple
    milliseconds: tuple[float, ...] = ()
    problem: str | None = None

    def relative_to(self, other: Measured) -> float:
        """Geometric mean over the shapes of how long this takes relative to ``other``; infinite if this is out."""
        if self.problem is not None:
            return math.inf
        ratios = [ours / theirs for ours, theirs in zip(self.milliseconds, other.milliseconds, strict=True)]
        return math.prod(ratios) ** (1 / len(ratios))


@dataclass(frozen=True)
class Search:
    """What :func:`search` measured: ``table`` is the table's own row, ``best`` the one to put there."""

    table: Measured
    best: Measured
    measured: list[Measured]
    finished: bool


def choices(family: str, dim: int) -> dict[str, tuple[Any, ...]]:
    """Values of each field that are worth a measurement for vectors of ``dim``.

    Examples
    --------
    >>> choices("query_gradient", 48)["block_d"]
    (32, 64)
    """
    widest = max(16, next_power_of_2(dim))
    return {
        name: tuple(value for value in values if name not in SPAN_D or value <= widest)
        for name, values in CANDIDATES[family].items()
    }


def search(
    table: NamedTuple,
    values: dict[str, tuple[Any, ...]],
    measure: Callable[[NamedTuple], Measured],
    expired: Callable[[], bool],
) -> Search:
    """Vary one field at a time, from the table's row on, until no field is better changed or the time is up.

    Parameters
    ----------
    table
        The table's own row.
    values
        What each field may be, see :func:`choices`.
    measure
        Measures one configuration. What it reports as a problem is never chosen.
    expired
        Whether the time is up.

    Returns
    -------
    Search
        ``best`` was measured twice, at the end right after the table's row, and was clearly faster both
        times; otherwise it is the table's row.

    Raises
    ------
    TuningError
        The table's row itself fails.
    """
    own = _own(table, measure)
    measured = {table: own}
    best, before, finished = own, None, True
    while finished and best is not before:
        before = best
        for name, options in values.items():
            for value in options:
                # From the best so far, so that a gain in one field is kept while the next is varied.
                tiles = best.tiles._replace(**{name: value})
                if tiles in measured or not finished:
                    continue
                if expired():
                    finished = False
                    continue
                measured[tiles] = measure(tiles)
                if measured[tiles].relative_to(best) < FASTER:
                    best = measured[tiles]
    if best is not own:
        own_again, best_again = _own(table, measure), measure(best.tiles)
        if best_again.relative_to(own_again) < FASTER:
            own, best = own_again, best_again
            measured |= {table: own, best.tiles: best}
        else:
            best = own
    return Search(own, best, list(measured.values()), finished)


def _own(table: NamedTuple, measure: Callable[[NamedTuple], Measured]) -> Measured:
    own = measure(table)
    if own.problem is not None:
        raise TuningError(f"the table's own {table} fails on this GPU: {own.problem}.")
    return own
