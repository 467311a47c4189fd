"""The plot of static late interaction on the Cranfield collection: quality against entries of a document."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness.plots import COLOURS, plt
from benchmarks.quality.static_cranfield_table import (
    BM25_CELL,
    BM25_THRESHOLDS,
    ENCODER_CELL,
    THRESHOLDS,
    cell_name,
)

# Of each line: weights of query tokens, weights of document tokens, thresholds.
LINES = {
    "no weights": ("none", None, THRESHOLDS),
    "norms of model2vec": ("norms", None, THRESHOLDS),
    "IDF": ("IDF", None, THRESHOLDS),
    "IDF and BM25's saturation": ("IDF", "BM25", BM25_THRESHOLDS),
}


def plot(cells: dict[str, dict], results: Path) -> None:
    """nDCG@10 against the entries of a document, a point for each threshold, beside the results file."""
    figure, axis = plt.subplots(figsize=(7, 5))
    for (title, (weights, documents, thresholds)), colour in zip(LINES.items(), COLOURS, strict=True):
        known = {each: cells[cell_name(each, documents)] for each in thresholds if cell_name(each, documents) in cells}
        points = [(cell["nonzeros"], cell["metrics"][weights]["ndcg@10"]) for cell in known.values()]
        axis.plot(*zip(*points, strict=True), "-o", color=colour, label=title)
        if title in ("no weights", "IDF and BM25's saturation"):
            for threshold, point in zip(known, points, strict=True):
                axis.annotate(f"{threshold:g}", point, (0, 6), textcoords="offset points", fontsize=8, ha="center")
    for name, weights, line in ((ENCODER_CELL, "none", "--"), (BM25_CELL, "IDF", ":")):
        if name in cells:
            title = "the encoder's late interaction" if name == ENCODER_CELL else name
            axis.axhline(cells[name]["metrics"][weights]["ndcg@10"], linestyle=line, color=COLOURS[0], label=title)
    axis.set(xlabel="entries a document", ylabel="nDCG@10", title="Cranfield, by threshold", xscale="log")
    axis.grid(alpha=0.3, which="both")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(results.with_suffix(".png"), dpi=150)
    plt.close(figure)
