"""The plot of the benchmark of compressed documents: time of the forward, by shape and format."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness.plots import plt
from benchmarks.operators.compressed_table import COMPETITORS, FORMATS, fastest, milliseconds, shapes_of

COLOURS = {"fast": "#d62728", "lik": "#1f77b4", "flash": "#2ca02c", "naive": "#555555"}


def plot(cells: dict, results: Path) -> None:
    """Bars beside the results file, a panel for each shape; the line is bfloat16 of this package."""
    shapes = shapes_of(cells)
    figure, axes = plt.subplots(1, len(shapes), figsize=(4.5 * len(shapes), 4.5), squeeze=False)
    for axis, shape in zip(axes[0], shapes, strict=True):
        for place, (competitor, colour) in enumerate(COLOURS.items()):
            points = []
            for index, form in enumerate(FORMATS):
                if competitor in ("fast", "naive"):
                    ms = milliseconds(cells, shape, competitor, form)
                else:
                    found = fastest(cells, shape, (competitor,), form)
                    ms = found and found[1]
                if ms:
                    points.append((index + (place - 1.5) * 0.2, ms))
            bars = axis.bar(*zip(*points, strict=True), 0.19, color=colour, label=COMPETITORS[competitor]) if points else []  # fmt: skip
            if points:
                axis.bar_label(bars, fmt="{:.3g}", fontsize=6, padding=1, rotation=90)
        base = milliseconds(cells, shape, "fast", "bf16")
        if base:
            axis.axhline(base, color=COLOURS["fast"], linestyle="--", linewidth=1, label="this package, bf16")
        axis.set_xticks(range(len(FORMATS)), [form.replace(" ", "\n", 1) for form in FORMATS], fontsize=7)
        axis.set(ylabel="time (ms)", title=shape.replace(".packed", ", packed").replace(".", " against "))
        axis.margins(y=0.15)
        if axis.patches:
            axis.set_yscale("log")
        axis.grid(alpha=0.3, axis="y")
    figure.suptitle("MaxSim of compressed documents, forward, d = 128")
    labels = {}
    for axis in axes[0]:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            labels.setdefault(label, handle)
    figure.legend(labels.values(), labels.keys(), loc="lower center", ncols=len(labels), frameon=False)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(results.with_suffix(".png"), dpi=130)
    plt.close(figure)
