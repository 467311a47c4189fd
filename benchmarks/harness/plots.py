"""What the plots of the benchmarks share: pyplot without a display, colours, and bars."""

from __future__ import annotations

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

COLOURS = ["#555555", "#1f77b4", "#2ca02c", "#d62728"]  # stock, the two peers, this package


def bars(rows: list[tuple[str, str]], measures: dict[str, tuple[list, list[str]]], title: str) -> plt.Figure:
    """Horizontal bars. ``rows`` are titles and colours; ``measures`` give by label the values and their texts.

    A value of ``None`` has no bar.
    """
    figure, axes = plt.subplots(1, len(measures), figsize=(11, 1.2 + 0.5 * len(rows)), sharey=True)
    for axis, (label, (values, texts)) in zip(axes, measures.items(), strict=True):
        lengths = [value or 0 for value in values]
        drawn = axis.barh(range(len(rows)), lengths, color=[colour for _, colour in rows])
        axis.bar_label(drawn, texts, padding=3)
        axis.set(xlabel=label, xlim=(0, 1.25 * max(lengths, default=0) or 1))
        axis.set_yticks(range(len(rows)), [name for name, _ in rows])
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    figure.suptitle(title)
    figure.tight_layout()
    return figure
