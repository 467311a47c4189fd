"""The plots of the benchmarks: panels of bars and of curves, without a display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

COLOURS = ["#555555", "#1f77b4", "#2ca02c", "#d62728"]  # stock, the two peers, this package


class Line(NamedTuple):
    """A curve through points; ``band`` has a lowest and a highest value of each."""

    label: str | None
    colour: str
    points: Sequence[tuple[float, float]]
    style: str = "o-"
    band: Sequence[tuple[float, float]] = ()


def bars(panels: Mapping[str, Sequence[tuple[str, str, float]]], target: Path, title: str) -> None:
    """Write a panel of horizontal bars a label, from 0: of each its name, colour and length, which is written behind it."""
    figure, axes = plt.subplots(1, len(panels), figsize=(11, 3), sharey=True)
    for axis, (label, rows) in zip(axes, panels.items(), strict=True):
        names, colours, lengths = zip(*reversed(rows), strict=True)
        axis.bar_label(axis.barh(names, lengths, color=colours), fmt="{:,.0f}", padding=3)
        axis.set(xlabel=label, xlim=(0, 1.12 * max(lengths)))
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(target, dpi=130)
    plt.close(figure)


def curves(
    panels: Sequence[tuple[Mapping[str, object], Sequence[Line]]], target: Path, title: str = "", rows: int = 1
) -> None:
    """Write panels to a file, each with the settings of its axis and its lines; ``xticks`` are written as they are."""
    figure, axes = plt.subplots(rows, len(panels) // rows, figsize=(11, 1 + 4 * rows), squeeze=False)
    for axis, (settings, lines) in zip(axes.flat, panels, strict=True):
        for line in lines:
            x, y = zip(*line.points, strict=True) if line.points else ((), ())
            axis.plot(x, y, line.style, color=line.colour, label=line.label)
            if line.band:
                axis.fill_between(x, *zip(*line.band, strict=True), color=line.colour, alpha=0.2)
        axis.set(**settings)
        if "xticks" in settings:
            axis.set_xticks(settings["xticks"], settings["xticks"])
            axis.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
        axis.grid(alpha=0.3)
    labels = dict(zip(*reversed(axes.flat[0].get_legend_handles_labels()), strict=True))
    figure.legend(labels.values(), labels.keys(), loc="lower center", ncols=3, fontsize=8, frameon=False)
    figure.suptitle(title)
    figure.tight_layout(rect=(0, 0.03 * (1 + len(labels) // 3), 1, 1))
    figure.savefig(target, dpi=130)
    plt.close(figure)
