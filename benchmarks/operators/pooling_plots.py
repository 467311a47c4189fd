"""The plot of the benchmark of pooling: time and memory of forward + backward."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness.plots import plt
from benchmarks.operators.pooling_table import COMPETITORS, POOLINGS, shapes_of

COLOURS = {"fast": "#d62728", "ragged": "#ff9896", "compile": "#b8860b", "einsum": "#555555"}
# Keys of a result, with label, unit and number format.
MEASURES = {
    "ms": ("time (ms)", 1, "{:.3g}"),
    "beyond_gradients_bytes": ("memory beyond the gradients (MiB)", 2**20, "{:,.0f}"),
}


def plot(cells: dict, results: Path) -> None:
    """Bars beside the results file, a row for each shape and a group for each pooling; what failed has no bar."""
    shapes = shapes_of(cells)
    figure, axes = plt.subplots(len(shapes), len(MEASURES), figsize=(11, 3.5 * len(shapes)), squeeze=False)
    for row, shape in zip(axes, shapes, strict=True):
        for axis, (key, (label, unit, pattern)) in zip(row, MEASURES.items(), strict=True):
            for place, (competitor, title) in enumerate(COMPETITORS.items()):
                values = [
                    cells.get(f"{shape}/{pooling}/{competitor}", {}).get("forward_backward", {}).get(key)
                    for pooling in POOLINGS
                ]
                points = [(index, value / unit) for index, value in enumerate(values) if value]
                x = [index + (place - 1.5) * 0.2 for index, _ in points]
                colour = COLOURS[competitor]
                drawn = axis.bar(x, [y for _, y in points], 0.19, color=colour, label=title.replace("`", ""))
                axis.bar_label(drawn, fmt=pattern, fontsize=6, padding=1)
            axis.set_xticks(range(len(POOLINGS)), [name.replace("`", "") for name in POOLINGS.values()], fontsize=8)
            axis.set(ylabel=label, title=shape.replace(".", " against "))
            if axis.patches:
                axis.set_yscale("log")
            axis.grid(alpha=0.3, axis="y")
    figure.suptitle("Pooling, forward + backward, d = 128, bf16")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="lower center", ncols=len(COMPETITORS), frameon=False)
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(results.with_suffix(".png"), dpi=130)
    plt.close(figure)
