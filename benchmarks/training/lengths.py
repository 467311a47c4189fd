"""Training steps by the share of padding: documents of several mean lengths, stock PyLate and this package.

    python -m benchmarks lengths                  # measure what is missing, then print the table

Steps are those of the suite train_step at one batch size. Lengths are log-normal and truncated at 300, to which PyLate
pads; with a mean of 3,000 every document is truncated and there is no padding.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

from benchmarks.harness.tables import table
from benchmarks.training import steps
from benchmarks.training.steps import SWITCH, draw_curves, entry, run  # noqa: F401
from benchmarks.training.train_step import add_step_options, measure, row_title, step_of  # noqa: F401

TIMEOUT = 480
# With the colours of the plot.
PATHS = {"stock": "#555555", "fast": "#d62728"}


def add_options(parser: argparse.ArgumentParser) -> None:
    steps.add_options(parser, PATHS, [128], different=12, warmup=12, steps=24)
    parser.add_argument("--tokens", type=int, nargs="+", default=[40, 80, 150, 300, 3000], help="means of the lengths")
    add_step_options(parser)


def cell_name(path: str, tokens: int, compiled: bool) -> str:
    return f"{path}/tokens={tokens}/compile={int(compiled)}"


def cells(options: argparse.Namespace) -> dict[str, dict]:
    step = {**step_of(options), "batch": options.batches[0], "checkpointing": False}
    return {
        cell_name(path, tokens, compiled): {**step, "path": path, "compile": compiled, "mean_tokens": tokens}
        for compiled, tokens, path in itertools.product(SWITCH[options.compile], options.tokens, options.paths)
    }


def mean_lengths(cells: dict) -> list[int]:
    """The mean lengths with a measured step, from which the share of padding is known."""
    return sorted({cell["mean_tokens"] for cell in cells.values() if cell["status"] == "ok"})


def live_share(cells: dict, tokens: int) -> float:
    """The share of the padded documents that is not padding."""
    return next(
        cell["live_document_tokens"] / cell["padded_document_tokens"]
        for cell in cells.values()
        if cell["mean_tokens"] == tokens and cell["status"] == "ok"
    )


def markdown(content: dict) -> str:
    """Step time and peak memory by the share of padding, with the speed relative to stock."""
    cells = content["cells"]
    pairs = list(itertools.product([False, True], PATHS))
    lines = []
    for tokens in mean_lengths(cells):
        found = [[cells.get(cell_name(each, tokens, compiled)) for each in (path, "stock")] for compiled, path in pairs]
        lines.append([f"{1 - live_share(cells, tokens):.0%}", *(entry(*pair, marked=True) for pair in found)])
    return table(["padding", *(row_title(path, compiled) for compiled, path in pairs)], lines)


def plot(content: dict, target: Path) -> None:
    cells = content["cells"]
    curves = {
        row_title(path, compiled): (
            colour,
            "o--" if compiled else "o-",
            [(live_share(cells, each), cells.get(cell_name(path, each, compiled), {})) for each in mean_lengths(cells)],
        )
        for compiled, (path, colour) in itertools.product([False, True], PATHS.items())
    }
    label = "share of the padded documents that is not padding"
    draw_curves(curves, target.with_suffix(".png"), "", xlabel=label, xlim=(0, 1.02))
