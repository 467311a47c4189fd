"""Markdown tables of the Cranfield trainings with each pooling: means over seeds, and spreads from lowest to highest."""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean
from typing import Any

from benchmarks.harness.tables import table
from pylate_fastmaxsim import LogSumExp, Max, Softmax, TopK
from pylate_fastmaxsim.ops.pooled import Pooling

Value = Callable[[dict[str, Any]], float]

# The temperature of log-sum-exp is colpali-engine's. A cosine is at most 1, so at 1.0 softmax is nearly a mean.
POOLINGS: dict[str, Pooling] = {
    "max": Max(),
    "top-4": TopK(4),
    "softmax 1.0": Softmax(1.0),
    "softmax 0.05": Softmax(0.05),
    "log-sum-exp 0.1": LogSumExp(0.1),
}
# Of each column, how a cell gives its figure, and the digits shown.
QUALITY: dict[str, tuple[Value, int]] = {
    "nDCG@10 before": (lambda cell: cell["before"]["own"]["ndcg@10"], 4),
    "after": (lambda cell: cell["after"]["own"]["ndcg@10"], 4),
    "after, scored by the maximum": (lambda cell: cell["after"].get("max", cell["after"]["own"])["ndcg@10"], 4),
    "Recall@1": (lambda cell: cell["after"]["own"]["recall@1"], 4),
    "Gini, score": (lambda cell: cell["gradient_concentration"][-1]["score_gini"], 2),
    "Gini, loss": (lambda cell: cell["gradient_concentration"][-1]["loss_gini"], 2),
    "tokens that win": (lambda cell: cell["gradient_concentration"][-1]["score_winning_share"], 2),
}
# Of each column, the sweep, the metric and the setting.
ROBUSTNESS: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{f"x{times}": ("lengths", "ndcg@10", {"times": times}) for times in (1, 2, 4, 8)},
    "25 targeted": ("injection", "ndcg@10", {"attack": "targeted", "tokens": 25, "noise": 1.5}),
    "their weight": ("injection", "injected_weight", {"attack": "targeted", "tokens": 25, "noise": 1.5}),
    "25 closer": ("injection", "ndcg@10", {"attack": "targeted", "tokens": 25, "noise": 0.5}),
    "400 random": ("injection", "ndcg@10", {"attack": "random", "tokens": 400, "noise": 1.5}),
    "400 in all": ("injection", "ndcg@10", {"attack": "targeted, in all documents", "tokens": 400, "noise": 1.5}),
}


def markdown(cells: dict[str, dict]) -> str:
    """Quality and gradients of each pooling; then nDCG@10 in longer documents and with injected tokens, by scoring."""
    quality, robustness = [], []
    for pooling in POOLINGS:
        same = [cell for cell in cells.values() if cell["cell"]["pooling"] == pooling and cell["status"] == "ok"]
        if not same:
            continue
        quality.append([pooling, *(_entry(same, *column) for column in QUALITY.values())])
        for scoring in same[0]["after"]:
            entries = [_entry(same, _of_row(scoring, *column), 3) for column in ROBUSTNESS.values()]
            robustness.append([pooling, "itself" if scoring == "own" else "the maximum", *entries])
    first = table(["trained with", *QUALITY], quality)
    return f"{first}\n\n{table(['trained with', 'scored by', *ROBUSTNESS], robustness)}"


def _entry(cells: list[dict], value: Value, digits: int) -> str:
    values = [value(cell) for cell in cells]
    spread = f" ({max(values) - min(values):.{digits}f})" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{spread}"


def _of_row(scoring: str, sweep: str, metric: str, setting: dict[str, Any]) -> Value:
    """A metric of the row of a sweep that has a setting."""

    def value(cell: dict) -> float:
        [row] = [row for row in cell[sweep] if row["pooling"] == scoring and setting.items() <= row.items()]
        return row[metric]

    return value
