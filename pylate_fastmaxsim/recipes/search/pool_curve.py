"""A picture of quality against the vectors that token pooling leaves."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pylate_fastmaxsim.reporting.figures import hide_frame, write_png
from pylate_fastmaxsim.reporting.numbers import METRICS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METRIC = "ndcg@10"
LEVEL = 0.05  # of p, below which a point is hollow


def write_pool_curve(result: Mapping[str, Any], file: Path) -> None:
    """Draw nDCG@10 of each model against vectors per document, of the result of ``evaluate``.

    A point is hollow where it differs from the first of its model by more than chance.
    """
    write_png(file, partial(_draw, result), f"{result['collection']}: {METRICS[METRIC]} by pool factor", 7, 4.4)


def _draw(result: Mapping[str, Any], figure: Figure) -> None:
    axes = figure.subplots()
    differs = {
        tuple(row["models"]) for row in result["pairs"] if row["metric"] == METRIC and row["corrected_p"] < LEVEL
    }
    curves: dict[str, list[dict[str, Any]]] = {}
    for model in result["models"]:
        if model["vectors"] is None:  # sparse, or behind a first stage
            continue
        curves.setdefault(model["model"], []).append(model)
    for models in curves.values():
        first = models[0]["label"]
        x = [model["vectors"] / result["documents"] for model in models]
        y = [model["metrics"][METRIC] for model in models]
        (line,) = axes.plot(x, y, "-", label=first)
        for model, *point in zip(models, x, y, strict=True):
            fill = "white" if (first, model["label"]) in differs else line.get_color()
            axes.plot(*point, "o", color=line.get_color(), markerfacecolor=fill)
            axes.annotate(
                f"{model['pool_factor']:g}", point, (0, 6), textcoords="offset points", fontsize=8, ha="center"
            )
    axes.set_xlabel(f"vectors per document; pool factors beside points, hollow: differs from the first, p < {LEVEL}")
    axes.set_ylabel(METRICS[METRIC])
    hide_frame(axes)
    # Underscores and dollar signs in a name are no markup.
    for text in axes.legend(frameon=False).get_texts():
        text.set_parse_math(False)
