"""Time and peak memory of training steps: curves over batch sizes, or bars where there is only one."""

from __future__ import annotations

from pathlib import Path

import matplotlib

from benchmarks.harness.plots import COLOURS, bars, plt

# Keys of a cell, with label and number format.
MEASURES = {"step_ms": ("step time (ms)", ",.0f"), "peak_gib": ("peak memory (GiB)", ".1f")}
TITLE = "One training step of ModernBERT-base"


def plot(cells: dict, rows: dict[str, dict[bool, str]], target: Path, checkpointing: bool = False) -> None:
    """Draw the cells of train_step.py with gradient checkpointing, or those without.

    ``rows`` gives for each path its title without and with compilation.
    """
    # Titles are markdown.
    titles = {
        (path, compiled): (title.replace("`", ""), colour)
        for (path, both), colour in zip(rows.items(), COLOURS, strict=True)
        for compiled, title in both.items()
    }
    found = {
        (cell["cell"]["path"], cell["cell"]["compile"], cell["cell"]["batch"]): cell
        for cell in cells.values()
        if cell["cell"]["checkpointing"] == checkpointing
    }
    batches = sorted({batch for _, _, batch in found})
    if len(batches) == 1:
        figure = _bars({key[:2]: cell for key, cell in found.items()}, titles, batches[0])
    else:
        figure = _curves(found, titles, batches)
    if checkpointing:
        figure.suptitle(f"{TITLE}, with gradient checkpointing")
    figure.savefig(target, dpi=150)
    plt.close(figure)


def _curves(found: dict, titles: dict, batches: list[int]) -> plt.Figure:
    figure, axes = plt.subplots(1, 2, figsize=(11, 5))
    for axis, (key, (label, _)) in zip(axes, MEASURES.items(), strict=True):
        for (path, compiled), (title, colour) in titles.items():
            cells = [found.get((path, compiled, batch)) for batch in batches]
            measured = [(batch, cell.get(key)) for batch, cell in zip(batches, cells, strict=True) if cell]
            points = [point for point in measured if point[1] is not None]
            if points:
                axis.plot(*zip(*points, strict=True), "o--" if compiled else "o-", color=colour, label=title)
        axis.set(xlabel="batch size (queries)", ylabel=label, xscale="log", yscale="log")
        axis.set_xticks(batches)
        for scale in (axis.xaxis, axis.yaxis):
            scale.set_major_formatter(matplotlib.ticker.ScalarFormatter())
            scale.set_minor_formatter(matplotlib.ticker.NullFormatter())
        axis.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
        axis.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
        axis.grid(alpha=0.3)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.suptitle(TITLE)
    figure.legend(handles, labels, loc="lower center", ncols=2, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.17, 1, 1))
    return figure


def _bars(found: dict, titles: dict, batch: int) -> plt.Figure:
    rows = [key for key in titles if key in found]
    loss = next((value for cell in found.values() for value in _loss(cell)), "contrastive").replace("_", " ")
    measures = {
        label: (
            [found[row].get(key) for row in rows],
            [_written(found[row], key, style) for row in rows],
        )
        for key, (label, style) in MEASURES.items()
    }
    return bars([titles[row] for row in rows], measures, f"{TITLE}, {loss}, batch {batch}")


def _written(cell: dict, key: str, style: str) -> str:
    """A number of a cell, or why there is none."""
    if cell["status"] != "ok":
        return cell["status"]
    return "" if cell[key] is None else format(cell[key], style)


def _loss(cell: dict) -> list[str]:
    options = cell["options"]
    return [options[options.index("--loss") + 1]] if "--loss" in options else []
