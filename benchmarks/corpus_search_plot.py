"""Time and memory of the paths of corpus_search.py, as bars beside the results."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def draw(rows: list[tuple[str, float, int | None]], title: str, target: Path) -> None:
    """``rows`` are a path's title, its seconds for the whole corpus, and its peak of device memory, None on a CPU."""
    measures = {
        "time for the whole corpus (s)": ([seconds for _, seconds, _ in rows], "{:.2f}"),
        "device memory (GiB)": ([(peak or 0) / 2**30 for *_, peak in rows], "{:.1f}"),
    }
    figure, axes = plt.subplots(1, 2, figsize=(11, 1.4 + 0.5 * len(rows)), sharey=True)
    colours = ["#555555" if path == "PyLate" else "#d62728" for path, *_ in rows]
    for axis, (label, (values, style)) in zip(axes, measures.items(), strict=True):
        bars = axis.barh(range(len(rows)), values, color=colours)
        axis.bar_label(bars, fmt=style, padding=3)
        axis.set(xlabel=label, xlim=(0, 1.2 * max(values) or 1))
        axis.set_yticks(range(len(rows)), [path for path, *_ in rows])
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(target, dpi=150)
    plt.close(figure)
