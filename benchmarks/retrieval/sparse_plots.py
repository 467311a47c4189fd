"""The plot of the benchmark of sparse search: time against the size of the collection."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness.plots import COLOURS, plt
from benchmarks.retrieval.sparse_table import ENGINES, PUBLISHED, sizes, value


def plot(cells: dict, results: Path) -> None:
    """Milliseconds of 500 queries, k = 1000, beside the results file."""
    figure, axis = plt.subplots(figsize=(7, 5))
    lines = {
        title.strip("`"): {size: value(cells, f"{size}/{engine}/k=1000") for size in sizes(cells)}
        for engine, title in ENGINES.items()
    }
    lines["scatter-add, as published"] = PUBLISHED
    styles = zip((COLOURS[3], COLOURS[1], COLOURS[2], COLOURS[0]), "oss^", ("-", "-", "-", ":"), strict=True)
    for (title, points), (colour, marker, line) in zip(lines.items(), styles, strict=True):
        known = {size: ms for size, ms in points.items() if ms is not None}
        axis.plot(list(known), list(known.values()), line, marker=marker, color=colour, label=title)
        for size, ms in known.items():
            above = 6 if title != "cuSPARSE" else -14  # its times are those of scatter-add, nearly
            axis.annotate(f"{ms:.3g}", (size, ms), (0, above), textcoords="offset points", fontsize=8, ha="center")
    axis.set(xlabel="documents", ylabel="ms", title="500 queries, k = 1000", xscale="log", yscale="log")
    axis.grid(alpha=0.3, which="both")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(results.with_suffix(".png"), dpi=150)
    plt.close(figure)
