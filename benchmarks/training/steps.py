"""What suites of training steps share: how a step is timed, which paths take turns, the table and the curves."""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.harness.suite import command
from benchmarks.harness.tables import table
from benchmarks.harness.timing import DEVICE, peaks_gib
from benchmarks.harness.turns import measure_by_turns, speed, step_times
from benchmarks.harness.workers import ask_apart

OUT_OF_MEMORY = "out of memory"
# Choices of --compile and --checkpointing.
SWITCH = {"no": [False], "yes": [True], "both": [False, True]}
MEASURES = {"step_ms": "step time (ms)", "peak_gib": "peak memory (GiB)"}


def add_options(
    parser: argparse.ArgumentParser, paths: Sequence[str], batches: Sequence[int], compiled: bool = True, **times: int
) -> None:
    """The options of a suite of steps; ``times`` are the defaults of --different, --warmup and --steps."""
    parser.add_argument("--paths", nargs="+", choices=list(paths), default=list(paths))
    parser.add_argument("--batches", nargs="+", type=int, default=list(batches))
    parser.add_argument("--alone", action="store_true", help="stock and fast of a batch one after the other")
    for name, default in times.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    if compiled:
        parser.add_argument("--compile", choices=list(SWITCH), default="both")
        parser.add_argument("--layers", type=int, help="fewer encoder layers, for a trial")


def adamw(weights: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(weights, lr=2e-5, fused=DEVICE.type == "cuda")


def measured(
    loss_of: Callable[[int], Tensor],
    optimizer: torch.optim.Optimizer,
    cell: Mapping,
    of_ranks: Callable[[list[float]], list[float]] = lambda each: each,
) -> dict:
    """Warm up and time steps as often as the cell says: ``loss_of(index)``, its backward and the optimizer.

    A loss without a graph has made its backward itself. ``of_ranks`` is what all ranks report of times and memory of each.
    """

    def step(index: int) -> Tensor:
        loss = loss_of(index)
        if loss.requires_grad:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    cuda = DEVICE.type == "cuda"
    began = time.perf_counter()
    losses = [step(index) for index in range(cell["warmup"])]
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    warmup_seconds = time.perf_counter() - began
    limit = cell.get("seconds") or math.inf
    seconds = step_times(lambda index: losses.append(step(index)), cell["warmup"], cell["steps"], cuda, limit)
    times = [each * 1e3 for each in of_ranks(seconds)]
    peak, reserved = of_ranks(peaks_gib()) if cuda else (None, None)
    return {
        "status": "ok",
        "timing": "CUDA events" if cuda else "host clock",
        "step_ms": statistics.median(times),
        "step_ms_min": min(times),
        "step_ms_max": max(times),
        "steps": len(times),
        "each_ms": times,
        "peak_gib": peak,
        "peak_reserved_gib": reserved,
        "warmup_seconds": warmup_seconds,
        # JSON has no NaN.
        "losses": [value if math.isfinite(value) else None for value in map(float, losses)],
    }


def padding(masks: Sequence[Tensor]) -> float | None:
    """The share of padding among tokens; None without masks, where a host pads nothing."""
    return 1 - sum(int(mask.sum()) for mask in masks) / sum(mask.numel() for mask in masks) if masks else None


def run(name: str, cells: dict[str, dict], options: argparse.Namespace) -> Iterator[tuple[str, dict]]:
    """Figures of steps: stock and fast, not compiled and alike otherwise, by turns; all others alone."""
    groups: dict[str, dict[str, dict]] = {}
    for each, cell in cells.items():
        by_turns = cell["path"] in ("stock", "fast") and not cell.get("compile") and not options.alone
        # A launcher does not pass a gate on to its ranks.
        by_turns &= cell.get("ranks", 1) == 1
        alike = sorted((key, value) for key, value in cell.items() if key != "path")
        groups.setdefault(str(alike) if by_turns else each, {})[each] = cell
    for group in groups.values():
        together = None
        if len(group) == 2:
            together = measure_by_turns(command(name), group, options.timeout)
        for each, cell in group.items():
            yield each, together[each] if together else step_apart(name, cell, options.timeout)


def step_apart(name: str, cell: dict, timeout: float) -> dict:
    """Figures of one step of a suite, from a new process."""
    result = ask_apart(command(name), cell, timeout)
    if "failure" not in result:
        return result
    # PyTorch's allocator raises an error; another allocation may end the process.
    status = OUT_OF_MEMORY if OUT_OF_MEMORY in result["failure"] else "failed"
    return {"status": status, "detail": result["failure"]}


def mark_of_runs(cell: dict, other: dict) -> str:
    """‡ where the cells are of two runs, or, without the time of their run, of two days or machines."""
    one, two = (each.get("environment", {}) for each in (cell, other))
    return "" if all(one.get(key) == two.get(key) for key in ("run", "date", "device", "host")) else "‡"


def time_and_memory(cell: dict) -> str:
    """Time and memory of a step, or why there are none; † marks times of the host's clock."""
    if cell["status"] != "ok":
        return cell["status"]
    text = f"{cell['step_ms']:,.0f} ms{'' if cell.get('timing', 'CUDA events') == 'CUDA events' else '†'}"
    return text + ("" if cell["peak_gib"] is None else f", {cell['peak_gib']:.1f} GiB")


def entry(cell: dict | None, first: dict | None, marked: bool = False) -> str:
    """Time and memory of a step, and how many times as fast it is as the first; ``marked``: ‡ if of two runs."""
    if cell is None:
        return ""
    text = time_and_memory(cell)
    if first and cell is not first and first["status"] == cell["status"] == "ok":
        text += f" ({speed(cell, first)}{mark_of_runs(cell, first) if marked else ''})"
    return text


def steps_table(
    cells: Mapping[str, dict],
    rows: Mapping[object, str],
    columns: Mapping[object, str],
    name: Callable[[object, object], str],
    corner: str = "",
    marked: bool = False,
) -> str:
    """A table of steps: titles by row and by column, ``name(row, column)`` of each cell. Speeds are against the first row.

    A cell that was not measured is out of memory where one before it in its row was.
    """
    top, lines = next(iter(rows)), []
    for row, title in rows.items():
        entries: list[str] = []
        for each in columns:
            cell = cells.get(name(row, each)) or ({"status": OUT_OF_MEMORY} if OUT_OF_MEMORY in entries else None)
            entries.append(entry(cell, cells.get(name(top, each)), marked))
        lines.append([title, *entries])
    return table([corner, *columns.values()], lines)


def draw_curves(
    curves_of: Mapping[str, tuple[str, str, list[tuple[float, dict]]]], target: Path, title: str, **axis
) -> None:
    """Time and memory side by side: by title a colour, a line style, and cells by their place on the axis."""
    from benchmarks.harness.plots import Line, curves

    panels = []
    for key, label in MEASURES.items():
        lines = [
            Line(name.replace("`", ""), colour, [(x, cell[key]) for x, cell in points if cell.get(key)], style)
            for name, (colour, style, points) in curves_of.items()
        ]
        panels.append(({"ylabel": label, **axis}, lines))
    curves(panels, target, title)
