"""The largest batch that each path can train with a loss.

    python -m benchmarks ceilings                           # measure what is missing, then print the table
    python -m benchmarks ceilings --losses contrastive --budget 300
    python -m benchmarks ceilings --losses cached_contrastive --paths fast --layers 4 --chunks 3    # memory of scoring alone

A cell is the search of one path: a step on a batch of each size that is tried, in a process of its own.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator

import torch

from benchmarks.harness.tables import table
from benchmarks.training.losses import TITLES
from benchmarks.training.steps import step_apart
from benchmarks.training.train_step import PATHS, add_step_options, row_title, step_of

TIMEOUT = 600
SMALLEST, LARGEST = 32, 2**20
# Powers of two and the sizes midway between them.
GRID = sorted({size for power in range(5, 21) for size in (2**power, 3 * 2 ** (power - 1)) if size <= LARGEST})
# GradCache's mini-batch, and how many rows of its batch differ, as in gradcache_step.json.
MINI_BATCH = 128
TILE = 512

# Share of the device's memory to aim at, since the line through two peaks is not exact.
_SAFE = 0.95


def next_batch(tried: dict[int, dict], first: int, capacity_gib: float | None, largest: int = LARGEST) -> int | None:
    """The batch size to try next, from the results so far by size; ``None`` once the ceiling is known or ``largest`` fits.

    It lies between the largest size that fits and the smallest that does not: where a line through the two largest
    peaks reaches the memory of the device, or in the middle.
    """
    went = sorted(size for size, result in tried.items() if result["status"] == "ok")
    stopped = sorted(size for size, result in tried.items() if result["status"] != "ok")
    below = GRID.index(went[-1]) if went else -1
    above = GRID.index(stopped[0]) if stopped else sum(size <= largest for size in GRID)
    if above - below <= 1:
        return None
    if not tried:
        return first
    if not went:
        return GRID[above // 2]
    fitting = _fitting({size: tried[size].get("peak_gib") for size in went}, capacity_gib)
    if fitting is not None:
        guess = max((index for index, size in enumerate(GRID) if size <= fitting), default=0)
    elif stopped:
        guess = (below + above) // 2
    else:
        guess = below + 2
    return GRID[min(max(guess, below + 1), above - 1)]


def _fitting(peaks: dict[int, float | None], capacity_gib: float | None) -> float | None:
    """The batch size at which a line through the two largest peaks reaches the memory of the device."""
    known = [(size, peak) for size, peak in sorted(peaks.items()) if peak is not None][-2:]
    if capacity_gib is None or len(known) < 2 or known[1][1] <= known[0][1]:
        return None
    (size, peak), (larger, higher) = known
    return larger + (_SAFE * capacity_gib - higher) * (larger - size) / (higher - peak)


def ceiling(tried: dict[int, dict]) -> tuple[int | None, int | None]:
    """The largest size that fits, and the smallest that does not."""
    went = [size for size, result in tried.items() if result["status"] == "ok"]
    stopped = [size for size, result in tried.items() if result["status"] != "ok"]
    return max(went, default=None), min(stopped, default=None)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--paths", nargs="+", choices=list(PATHS), default=list(PATHS))
    parser.add_argument("--losses", nargs="+", choices=list(TITLES)[:2], default=list(TITLES)[:2])
    parser.add_argument("--layers", type=int, help="fewer encoder layers than ModernBERT-base has")
    parser.add_argument("--first", type=int, choices=GRID, default=128, help="batch to try first")
    parser.add_argument("--largest", type=int, default=GRID[-1], help="try no larger batch")
    parser.add_argument("--chunks", type=int, help="only the memory of this many chunks of scores of GradCache")


def cells(options: argparse.Namespace) -> dict[str, dict]:
    made = {}
    for loss, path in itertools.product(options.losses, options.paths):
        # With --chunks only scoring is measured, which does not depend on compilation.
        for compiled in (False, True) if path == "fast" and options.chunks is None else (False,):
            cell = {"loss": loss, "layers": options.layers, "path": path, "compile": compiled, "chunks": options.chunks}
            made["/".join(f"{key}={value}" for key, value in cell.items())] = cell
    return made


def run(_: str, cells: dict[str, dict], options: argparse.Namespace) -> Iterator[tuple[str, dict]]:
    parser = argparse.ArgumentParser()
    add_step_options(parser)
    capacity = torch.cuda.get_device_properties(0).total_memory / 2**30 if torch.cuda.is_available() else None
    for name, cell in cells.items():
        given = ["--loss", cell["loss"], "--mini-batch", str(MINI_BATCH), "--tile", str(TILE), "--different", "1"]
        given += ["--warmup", "1", "--warmup-rows", str(SMALLEST), "--steps", "1"]
        step = parser.parse_args(given, argparse.Namespace(paths=options.paths, chunks=cell["chunks"]))
        tried: dict[int, dict] = {}
        while (batch := next_batch(tried, options.first, capacity, options.largest)) is not None:
            # A step on a few of its rows before creates the state of AdamW.
            asked = {**step_of(step), **cell, "batch": batch, "checkpointing": False}
            result = step_apart("train_step", asked, options.timeout)
            tried[batch] = {key: result.get(key) for key in ("status", "detail", "peak_gib")}
            print(name, batch, tried[batch], flush=True)
        yield name, {"tried": tried}


def markdown(content: dict) -> str:
    """The largest batch that fits, its peak memory, and what stopped the next size."""
    lines = []
    losses, paths = list(TITLES), list(PATHS)

    # All layers first.
    def order(cell: dict) -> tuple:
        place = losses.index(cell["loss"]), cell["layers"] or 0, paths.index(cell["path"])
        return (*place, cell["compile"], cell["chunks"] is not None)

    for cell in sorted(content["cells"].values(), key=order):
        tried = {int(batch): result for batch, result in cell["tried"].items()}
        largest, stopped = ceiling(tried)
        peak = "" if largest is None or tried[largest]["peak_gib"] is None else f"{tried[largest]['peak_gib']:.1f} GiB"
        reason = "not tried" if stopped is None else f"{stopped}: {tried[stopped]['status']}"
        title = TITLES[cell["loss"]] + ("" if cell["layers"] is None else f", {cell['layers']} layers")
        title += "" if cell["chunks"] is None else ", by memory"
        lines.append([title, row_title(cell["path"], cell["compile"]), str(largest or "none"), peak, reason])
    title = "The largest batch of which a step fits:\n\n"
    return title + table(["loss", "path", "largest batch", "peak memory", "next size tried"], lines)
