"""The largest batch that each path can train with a loss.

    python -m benchmarks ceilings                           # measure what is missing, then print the table
    python -m benchmarks ceilings --losses contrastive --budget 300

A cell is the search of one path: a step on a batch of each size that is tried, in a process of its own.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator

from benchmarks.harness.tables import table
from benchmarks.training import train_step
from benchmarks.training.losses import TITLES
from benchmarks.training.steps import step_apart
from benchmarks.training.train_step import PATHS, row_title

TIMEOUT = 600
SMALLEST = 32
# Powers of two and the sizes midway between them.
GRID = sorted(size for power in range(5, 21) for size in (2**power, 3 * 2 ** (power - 1)))[:-1]
# Mini-batches of GradCache, and how many rows of its batch differ, as in gradcache_step.json.
STEP = ["--mini-batch", "128", "--tile", "512", "--different", "1", "--warmup", "1", "--steps", "1"]


def next_batch(tried: dict[int, dict]) -> int | None:
    """The size to try next, midway between the largest that fits and the smallest that does not; None once both are known."""
    largest, stopped = ceiling(tried)
    below = GRID.index(largest) if largest else -1
    above = GRID.index(stopped) if stopped else len(GRID)
    return GRID[(below + above) // 2] if above - below > 1 else None


def ceiling(tried: dict[int, dict]) -> tuple[int | None, int | None]:
    """The largest size that fits, and the smallest that does not."""
    went = [size for size, result in tried.items() if result["status"] == "ok"]
    stopped = [size for size, result in tried.items() if result["status"] != "ok"]
    return max(went, default=None), min(stopped, default=None)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--paths", nargs="+", choices=list(PATHS), default=list(PATHS))
    parser.add_argument("--losses", nargs="+", choices=list(TITLES)[:2], default=list(TITLES)[:2])
    parser.add_argument("--layers", type=int, help="fewer encoder layers than ModernBERT-base has")


def cells(options: argparse.Namespace) -> dict[str, dict]:
    made = {}
    for loss, path in itertools.product(options.losses, options.paths):
        for compiled in (False, True) if path == "fast" else (False,):
            cell = {"loss": loss, "layers": options.layers, "path": path, "compile": compiled, "chunks": None}
            made["/".join(f"{key}={value}" for key, value in cell.items())] = cell
    return made


def run(_: str, cells: dict[str, dict], options: argparse.Namespace) -> Iterator[tuple[str, dict]]:
    parser = argparse.ArgumentParser()
    train_step.add_options(parser)
    for name, cell in cells.items():
        step = parser.parse_args([*STEP, "--loss", cell["loss"], "--warmup-rows", str(SMALLEST)])
        tried: dict[int, dict] = {}
        while (batch := next_batch(tried)) is not None:
            # A step on a few of its rows before creates the state of AdamW.
            asked = {**train_step.step_of(step), **cell, "batch": batch, "checkpointing": False}
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
        # An early run took the memory of scoring alone.
        title += "" if cell["chunks"] is None else ", by memory"
        lines.append([title, row_title(cell["path"], cell["compile"]), str(largest or "none"), peak, reason])
    return table(["loss", "path", "largest batch", "peak memory", "next size tried"], lines)
