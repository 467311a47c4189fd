"""Find the fastest tile sizes of MaxSim's kernels on this GPU, and print rows for the tables of tiles.

    python -m tools.tune --d 128 --dtype bf16 --budget 300

The rows go to stdout, every measurement to stderr. A configuration must give the result of the table's own row.
The forward's table is in kernels/maxsim/tiles.py, those of gradients are in kernels/winner_backward/tiles.py.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor

from pylate_fastmaxsim import TokenBatch
from pylate_fastmaxsim._operands import ScoringOperands
from pylate_fastmaxsim.kernels.maxsim import tiles as forward_tables
from pylate_fastmaxsim.kernels.runtime import arch
from pylate_fastmaxsim.kernels.winner_backward import tiles as gradient_tables
from tools.tile_search import CANDIDATES, Measured, Search, TuningError, choices, search

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# The exact products of the default float32_matmul_precision; for 16-bit vectors it has no meaning.
PRECISION = "highest"

# Relative error against the table's configuration. Scores are float32 sums whatever the vectors are; gradients
# are rounded to the dtype of the vectors, and so are the weights of their products.
SCORE_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-5}
# Another order of summation may decide a near tie otherwise.
SAME_WINNERS = 0.999

# Milliseconds of work in one CUDA graph; the median is over ten replays.
GRAPH_MS = 10


class Shape(NamedTuple):
    """Queries and documents of equal lengths; with ``candidates``, how many documents each query scores."""

    queries: int
    query_length: int
    documents: int
    document_length: int
    candidates: int | None = None

    def __str__(self) -> str:
        return f"{self.queries}x{self.query_length} {'own' if self.candidates else 'vs'} {self.documents}x{self.document_length}"


IN_BATCH = (Shape(256, 32, 512, 300), Shape(64, 32, 128, 180))
# A query with candidates of its own gets smaller forward tiles than the table's, so these time the gradients only.
DISTILLATION = (Shape(32, 32, 512, 300, candidates=16),)
SHAPES = {
    "forward": IN_BATCH,
    "query_gradient": IN_BATCH + DISTILLATION,
    "document_gradient": IN_BATCH,
    "candidate_gradient": DISTILLATION,
}


def tune(dim: int, dtype: str, budget: float) -> Iterator[tuple[str, Search]]:
    """Search the tiles of each family of kernels, an equal part of ``budget`` seconds each.

    Parameters
    ----------
    dim
        Size d of a token vector.
    dtype
        ``bf16``, ``fp16`` or ``fp32``.
    budget
        Seconds; the last measurement may go over it.

    Yields
    ------
    Name of the family, and what was measured.

    Raises
    ------
    TuningError
        The table's own row fails on this GPU, or a configuration left it unusable.
    """
    end = time.monotonic() + budget
    for place, family in enumerate(CANDIDATES):
        cases = [_Case(shape, dim, DTYPES[dtype]) for shape in SHAPES[family]]
        deadline = time.monotonic() + (end - time.monotonic()) / (len(CANDIDATES) - place)
        yield (
            family,
            search(
                table_row(family, dim, DTYPES[dtype]),
                choices(family, dim),
                partial(_measure, family, cases),
                lambda deadline=deadline: time.monotonic() > deadline,
            ),
        )


def tables_of(family: str) -> ModuleType:
    """The module that holds the tables of a family."""
    return forward_tables if family == "forward" else gradient_tables


def table_name(family: str, dim: int, dtype: torch.dtype) -> str:
    """Name of the table that this GPU's row is in."""
    # The forward is measured with winners, as training needs it.
    if family == "forward" and arch.table_row(forward_tables._FORWARD_WITH_WINNERS, *_key(dim, dtype)):
        return "_FORWARD_WITH_WINNERS"
    return f"_{family.upper()}"


def _key(dim: int, dtype: torch.dtype) -> tuple[int, str, int]:
    return arch.architecture(torch.device("cuda")), arch.arithmetic(dtype, PRECISION), dim


def table_row(family: str, dim: int, dtype: torch.dtype) -> NamedTuple:
    """What the tables hold for this GPU."""
    row = getattr(tables_of(family), f"{family}_tiles")
    arguments = _key(dim, dtype)
    # Enough rows for a tile of any size.
    return row(*arguments, rows_in_all=2**20, want_winners=True) if family == "forward" else row(*arguments)


class _Case:
    """Inputs of one shape, and what the table's tiles make of them."""

    def __init__(self, shape: Shape, dim: int, dtype: torch.dtype) -> None:
        from pylate_fastmaxsim.kernels.maxsim import launch as scores
        from pylate_fastmaxsim.kernels.winner_backward import launch as gradients

        self._scores_launch, self._gradients_launch = scores, gradients
        generator = torch.Generator("cuda").manual_seed(0)

        def batch(count: int, length: int) -> TokenBatch:
            values = torch.randn(count, length, dim, device="cuda", generator=generator)
            return TokenBatch.from_padded(torch.nn.functional.normalize(values, dim=-1).to(dtype))

        queries, documents = batch(shape.queries, shape.query_length), batch(shape.documents, shape.document_length)
        candidates = None
        if shape.candidates is not None:
            own = torch.arange(shape.queries * shape.candidates, device="cuda")
            candidates = own.view(shape.queries, shape.candidates) % shape.documents
        self._operands = ScoringOperands.of(queries, documents, candidates)
        self._scores, self._winners = scores.forward(self._operands, True)
        self._grad = torch.randn(self._scores.shape, device="cuda", generator=generator)
        self._grad_q, self._grad_d = self._backward(True, True)

    def run(self, family: str, tiles: NamedTuple) -> tuple[Tensor, Tensor]:
        """The one kernel family, with these tiles."""
        launch = self._scores_launch if family == "forward" else self._gradients_launch
        with mock.patch.object(launch, f"{family}_tiles", lambda *_: tiles):
            if family == "forward":
                # Without its cache, which would go on with the tiles of the call before.
                with mock.patch.object(launch, "_plan", launch._plan.__wrapped__):
                    return launch.forward(self._operands, True)
            return self._backward(family == "query_gradient", family != "query_gradient")

    def problem(self, family: str, tiles: NamedTuple) -> str | None:
        """How the result differs from that of the table's tiles, or None."""
        with _unwritten_memory_shows():
            first, second = self.run(family, tiles)
        if family == "forward":
            if not (error := _relative_error(first, self._scores)) < SCORE_TOLERANCE:
                return f"wrong scores, off by {error:.1g}"
            if not (same := (second == self._winners).float().mean().item()) > SAME_WINNERS:
                return f"wrong winners, {same:.2%} are those of the table's tiles"
            return None
        ours, expected = (first, self._grad_q) if family == "query_gradient" else (second, self._grad_d)
        if not (error := _relative_error(ours, expected)) < GRADIENT_TOLERANCE[expected.dtype]:
            return f"wrong gradient, off by {error:.1g}"
        return None

    def _backward(self, need_q: bool, need_d: bool) -> tuple[Tensor, Tensor]:
        backward = self._gradients_launch.backward
        return backward(self._grad, self._winners, self._operands, need_q, need_d)


def _measure(family: str, cases: list[_Case], tiles: NamedTuple) -> Measured:
    # Replays of a CUDA graph: the host queues no kernel of its own, so however slow it is, the GPU never waits for it.
    from triton.testing import do_bench_cudagraph

    try:
        for case in cases:
            if problem := case.problem(family, tiles):
                return Measured(tiles, problem=problem)
        times = [do_bench_cudagraph(partial(case.run, family, tiles), GRAPH_MS, return_mode="median") for case in cases]
    except Exception as error:  # whatever the compiler, the driver or the launch says about tiles that do not fit
        problem = (
            f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
        )
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            raise TuningError(f"{tiles} left the GPU unusable ({problem}), so nothing is chosen.") from error
        return Measured(tiles, problem=problem)
    return Measured(tiles, tuple(times))


@contextmanager
def _unwritten_memory_shows() -> Iterator[None]:
    """New memory holds NaN: it could hold the result of the run before, and hide that this one writes nothing."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _relative_error(ours: Tensor, expected: Tensor) -> float:
    expected = expected.double()
    return ((ours.double() - expected).norm() / expected.norm()).item()


def row_text(table: str, architecture: int, arithmetic: str, dim: int, found: Search) -> str:
    """Python text: a comment that says where the row belongs, and the row.

    ``table`` is the name of a table, ``architecture`` that of its rows which this GPU takes.
    """
    if found.best is found.table:
        verdict = "the table's own row, nothing was clearly faster"
    else:
        verdict = f"{1 / found.best.relative_to(found.table):.2f} times as fast as the table's row"
    return f'# {table}[{architecture}, "{arithmetic}"]: {verdict}\n({dim}, {found.best.tiles}),'


def measured_text(family: str, found: Search, shapes: Sequence[Shape]) -> str:
    """A line for every configuration that was tried, the fastest first: what it changes in the table's row, its times.

    The last column is the time relative to the table's row, the geometric mean over the shapes.
    """
    lines = [f"{family}, milliseconds at {', '.join(map(str, shapes))}"]
    lines[0] += "" if found.finished else " (stopped by the budget)"
    for one in sorted(found.measured, key=lambda one: one.relative_to(found.table)):
        relative = one.relative_to(found.table)
        times = " ".join(f"{milliseconds:10.4f}" for milliseconds in one.milliseconds)
        lines.append(
            f"{_changed(one.tiles, found.table.tiles):50} {one.problem if math.isinf(relative) else times}"
            + ("" if math.isinf(relative) else f" {relative:8.1%}")
        )
    return "\n".join(lines)


def _changed(tiles: NamedTuple, own: NamedTuple) -> str:
    changed = [f"{name}={value}" for name, value in tiles._asdict().items() if value != getattr(own, name)]
    return ", ".join(changed) or "the table's row"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--d", type=int, default=128, help="numbers of a token vector")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the token vectors")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds, shared equally by the kernel families")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("tuning measures a CUDA GPU, and PyTorch finds none on this machine")
    architecture, arithmetic, _ = _key(options.d, DTYPES[options.dtype])
    try:
        for family, found in tune(options.d, options.dtype, options.budget):
            print(measured_text(family, found, SHAPES[family]), file=sys.stderr, flush=True)
            table = table_name(family, options.d, DTYPES[options.dtype])
            print(row_text(table, architecture, arithmetic, options.d, found), flush=True)
    except TuningError as error:
        sys.exit(f"tune: {error}")


if __name__ == "__main__":
    main()
