"""Cells that are compared take turns with the steps that are measured, so that other work on the machine meets all alike.

Turns are those of ``fastmaxsim compare`` (docs/recipes.md); a cell that is not compared is measured alone.
"""

from __future__ import annotations

import functools
import json
import math
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from benchmarks.harness.timing import elapsed, mark
from benchmarks.harness.workers import child_variables
from pylate_fastmaxsim.comparison.gate import Gate
from pylate_fastmaxsim.comparison.turns import FINISHED, OUT_OF_MEMORY, Child, ChildFailed, take_turns
from pylate_fastmaxsim.comparison.verdict import verdict

# The cell of a process that takes turns, as JSON.
CELL = "FASTMAXSIM_BENCHMARK_CELL"


@functools.cache
def gate() -> Gate | None:
    """The gate of this process, if it takes turns with others."""
    return Gate.from_environment()


def serve_by_turns(answer: Callable[[dict], dict]) -> None:
    """Answer the cell of this process, which takes turns."""
    try:
        result = answer(json.loads(os.environ[CELL]))
    except torch.OutOfMemoryError as error:
        result = {"status": OUT_OF_MEMORY, "detail": str(error).split(". ")[0]}
    status = FINISHED if result["status"] == "ok" else result["status"]
    gate().finished(**{**result, "status": status})


def step_times(
    step: Callable[[int], object], first: int, steps: int, cuda: bool, limit: float = math.inf
) -> list[float]:
    """Seconds of each ``step(index)``, for ``steps`` indices from ``first`` on, on the device's clock.

    As in a training run, nothing else waits for the device between steps of a turn. A process without turns ends
    after ``limit`` seconds, if it has made 5 steps.
    """
    if gate():
        gate().before_step()
    pairs = []
    began, start = time.perf_counter(), mark(cuda)
    for index in range(first, first + steps):
        step(index)
        end = mark(cuda)
        pairs.append((start, end))
        if gate():
            gate().after_step(of=steps)
            end = mark(cuda)
        elif len(pairs) >= 5 and time.perf_counter() - began > limit:
            break
        start = end
    if gate():
        gate().steps_done()
    if cuda:
        torch.cuda.synchronize()
    return [elapsed(*pair) for pair in pairs]


def measure_by_turns(command: list[str], cells: Mapping[str, dict], timeout: float) -> dict[str, dict] | None:
    """Run cells that take turns, a Python process each; the results by name, or None if one failed or took too long.

    Results that took turns have the same ``turns``. Those other than the first have ``against_first``: the verdict on the
    speed relative to the first, and whether processes were started alone, because memory did not hold all.
    """
    with tempfile.TemporaryDirectory() as folder:
        children = {
            name: Child(
                [sys.executable, *command],
                Path(folder, f"{index}.log"),
                {**child_variables(), CELL: json.dumps(cell)},
            )
            for index, (name, cell) in enumerate(cells.items())
        }
        ends = time.monotonic() + 2 * timeout * len(children)

        def on_wait() -> None:
            if time.monotonic() > ends:
                raise TimeoutError

        try:
            turns = take_turns(children, on_wait=on_wait)
        except (ChildFailed, TimeoutError):
            return None
    first = next(iter(turns.runs.values()))
    results, number = {}, uuid.uuid4().hex[:8]
    for name, run in turns.runs.items():
        results[name] = {"status": "ok" if run.status == FINISHED else run.status, **run.result, "turns": number}
        judged = verdict(first, run) if run is not first else None
        if judged is not None:
            results[name]["against_first"] = {**judged, "restarted": turns.restarted}
    return results


def speed(cell: dict, first: dict) -> str:
    """How many times as fast a cell is as the first: of pairs of blocks if they took turns, else of their medians."""
    judged = cell.get("against_first") if cell.get("turns") == first.get("turns") else None
    if not judged:
        return f"{first['step_ms'] / cell['step_ms']:.2f}x"
    return f"about {judged['ratio']:.2g}x, busy machine" if judged["busy"] else f"{judged['ratio']:.2f}x"
