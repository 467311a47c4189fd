"""Plots of the losses benchmark: time and memory."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness.plots import COLOURS, plt
from benchmarks.losses.table import LOSS_TITLES, of_kind
from benchmarks.training.train_step import PATHS

MEASURES = {"ms": ("time (ms)", 1), "peak_bytes": ("peak memory (MiB)", 2**20)}


def plot_all(content: dict, target: Path) -> None:
    """Write a plot of the losses, if there are results of them, named after the results file."""
    if of_kind(content, "embedded"):
        _embedded(of_kind(content, "embedded"), target.with_suffix(".png"))


def _axes(rows: int):
    return plt.subplots(rows, len(MEASURES), figsize=(11, 4.5 * rows), squeeze=False)


def _save(figure, handles: tuple, target: Path) -> None:
    figure.legend(*handles, loc="lower center", ncols=2, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.12, 1, 1))
    figure.savefig(target, dpi=150)


def _embedded(cells: list[dict], target: Path) -> None:
    """Bars, a group for each loss and document length."""
    figure, axes = _axes(1)
    shapes = list(dict.fromkeys((cell["cell"]["loss"], cell["cell"]["document_length"]) for cell in cells))
    width = 0.8 / len(PATHS)
    for axis, (measure, (label, unit)) in zip(axes[0], MEASURES.items(), strict=True):
        for place, (path, title) in enumerate(PATHS.items()):
            points = [
                (shapes.index((cell["cell"]["loss"], cell["cell"]["document_length"])), cell[measure] / unit)
                for cell in cells
                if cell["cell"]["path"] == path and cell.get(measure)
            ]
            if points:
                x, y = zip(*points, strict=True)
                axis.bar([n + place * width for n in x], y, width, color=COLOURS[place], label=title)
        names = [f"{LOSS_TITLES[loss]}\n{length} tokens" for loss, length in shapes]
        axis.set_xticks([n + 1.5 * width for n in range(len(shapes))], names, fontsize=7, rotation=20)
        axis.set(ylabel=label, yscale="log")
        axis.grid(alpha=0.3, axis="y")
    figure.suptitle("One loss from token embeddings to their gradients")
    _save(figure, axes[0, 0].get_legend_handles_labels(), target)
