"""Plots of the losses benchmark: time and memory on one GPU and on several."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness.plots import COLOURS, plt
from benchmarks.losses.table import LOSS_TITLES, RING_PATHS, of_kind
from benchmarks.training.train_step import PATHS

MEASURES = {"ms": ("time (ms)", 1), "peak_bytes": ("peak memory (MiB)", 2**20)}


def plot_all(content: dict, target: Path) -> None:
    """Write one plot for each part that has results, named after the results file."""
    if of_kind(content, "embedded"):
        _embedded(of_kind(content, "embedded"), target.with_suffix(".png"))
    if of_kind(content, "ring"):
        _ring(of_kind(content, "ring"), target.with_name(target.stem + "_ring.png"))


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


def _ring(cells: list[dict], target: Path) -> None:
    """Lines by the number of ranks: a row for each loss, a line style for each number of queries."""
    losses = list(dict.fromkeys(cell["cell"]["loss"] for cell in cells))
    queries = sorted({cell["cell"]["queries"] for cell in cells})
    figure, axes = _axes(len(losses))
    for row, loss in zip(axes, losses, strict=True):
        for axis, (measure, (label, unit)) in zip(row, MEASURES.items(), strict=True):
            for path, colour in zip(RING_PATHS, COLOURS, strict=True):
                for count, style in zip(queries, ("o-", "s--", "^:"), strict=False):
                    points = sorted(
                        (cell["cell"]["ranks"], cell[measure] / unit)
                        for cell in cells
                        if (cell["cell"]["loss"], cell["cell"]["path"], cell["cell"]["queries"]) == (loss, path, count)
                        and cell.get(measure)
                    )
                    if points:
                        title = f"{path}, {count} queries a rank"
                        axis.plot(*zip(*points, strict=True), style, color=colour, label=title)
            axis.set(xlabel="ranks", ylabel=label, title=LOSS_TITLES[loss], yscale="log")
            axis.set_xticks(sorted({cell["cell"]["ranks"] for cell in cells}))
            axis.grid(alpha=0.3)
    figure.suptitle("Documents of all ranks: gathered, and in a ring")
    _save(figure, axes[0, 0].get_legend_handles_labels(), target)
