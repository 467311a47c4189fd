"""Figures of robustness: metrics against length and injected tokens, hijack rates, and similarities of a pair."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pylate_fastmaxsim.diagnostics.injection import RANDOM, TARGETED
from pylate_fastmaxsim.files.replace import replace_file
from pylate_fastmaxsim.recipes.robustness.measure import Pair
from pylate_fastmaxsim.recipes.robustness.report import ATTACKS, attacks_of, title_of

METRICS = {"ndcg@10": "nDCG@10", "recall@1": "Recall@1"}
LABELLED = 48  # tokens of a query that still have room for their names

Draw = Callable[[Figure], None]


def draw_robustness(result: dict[str, Any], file: Path) -> None:
    """nDCG@10 and Recall@1 against length, and against the tokens of each attack."""
    figure = Figure(figsize=(15, 6), layout="constrained")
    overview(result)(figure)
    # Dollar signs in a name are not a formula.
    figure.suptitle(f"{title_of(result)}: robustness", fontsize=12, x=0.01, ha="left", parse_math=False)
    replace_file(file, lambda scratch: figure.savefig(scratch, dpi=130))


def overview(result: dict[str, Any]) -> Draw:
    """A row for each metric, a column for the lengths and for each attack."""

    def draw(figure: Figure) -> None:
        attacks = attacks_of(result)
        axes = figure.subplots(len(METRICS), 1 + len(attacks), sharey="row", sharex="col", squeeze=False)
        for row, (metric, name) in zip(axes, METRICS.items(), strict=True):
            _draw_lines(row[0], result, result["lengths"], "times", metric)
            for one, attack in zip(row[1:], attacks, strict=True):
                _draw_lines(one, result, _of(result, attack), "tokens", metric)
            row[0].set_ylabel(name)
            row[0].set_ylim(bottom=0)
        axes[0, 0].set_title("longer documents", fontsize=10)
        axes[-1, 0].set_xlabel("times as long")
        for place, title in enumerate(attacks.values(), start=1):
            axes[0, place].set_title(title, fontsize=10)
            axes[-1, place].set_xlabel("injected tokens")
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)

    return draw


def hijacking(result: dict[str, Any]) -> Draw:
    """The share of the weight of each pooling on injected tokens; that of the largest similarity is dotted."""

    def draw(figure: Figure) -> None:
        for axes, attack in zip(figure.subplots(1, 2, sharey=True), (TARGETED, RANDOM), strict=True):
            rows = _of(result, attack)
            _draw_lines(axes, result, rows, "tokens", "injected_weight")
            winners = {row["tokens"]: row["hijack_rate"] for row in rows}
            axes.plot(list(winners), list(winners.values()), "k:", label="hijack rate")
            axes.set_title(ATTACKS[attack], fontsize=10)
            axes.set_xlabel("injected tokens")
            axes.set_ylim(-0.02, 1.02)
        axes.legend(frameon=False, fontsize=9)

    return draw


def heat_maps(pair: Pair) -> Draw:
    """Similarities of a pair before the attack and after it; a dot marks the winner of each query token."""

    def draw(figure: Figure) -> None:
        values, own = pair.similarities, pair.similarities.shape[1] - pair.injected
        before, after = figure.subplots(1, 2, sharey=True, width_ratios=[own, values.shape[1]])
        for axes, shown, title in ((before, values[:, :own], "before"), (after, values, "after")):
            image = axes.imshow(
                shown.numpy(), aspect="auto", interpolation="nearest", cmap=matplotlib.colormaps["viridis"],
                vmin=float(values.min()), vmax=float(values.max()),
            )  # fmt: skip
            axes.plot(shown.argmax(dim=1), range(len(shown)), "o", color="#d9480f", markersize=3)
            axes.set_title(title, fontsize=10)
            axes.set_xlabel("document token")
        if pair.injected:
            after.axvline(own - 0.5, color="white", linewidth=1.5)
            after.set_xlabel(f"document token, the last {pair.injected} injected")
        if len(pair.query_tokens) == len(values) <= LABELLED:
            before.set_yticks(range(len(values)), pair.query_tokens, fontsize=6)
            for label in before.get_yticklabels():
                label.set_parse_math(False)
        figure.colorbar(image, ax=after, label="similarity")

    return draw


def _of(result: dict[str, Any], attack: str) -> list[dict[str, Any]]:
    return [row for row in result["injection"] if row["attack"] == attack]


def _draw_lines(axes: Axes, result: dict[str, Any], rows: list[dict[str, Any]], x: str, y: str) -> None:
    for pooling in result["poolings"]:
        some = [row for row in rows if row["pooling"] == pooling]
        axes.plot([row[x] for row in some], [row[y] for row in some], "o-", markersize=4, label=pooling)
    axes.set_xticks(list(dict.fromkeys(row[x] for row in rows)))
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
