"""Markdown table of the Cranfield benchmark: means and spreads over seeds, and how far fast is from stock."""

from __future__ import annotations

from statistics import mean

STAGES = {"untrained": "untrained", "contrastive": "after contrastive training", "distilled": "after mining and KD"}
METRICS = {"ndcg@10": "nDCG@10", "mrr@10": "MRR@10", "recall@100": "Recall@100"}
PATHS = ("stock", "fast")


def values(cells: dict, stage: str, path: str, metric: str) -> dict[int, float]:
    """A metric by seed. The untrained model is the same on both paths."""
    return {
        cell["cell"]["seed"]: cell[metric]
        for cell in cells.values()
        if cell["cell"]["stage"] == stage and cell["cell"]["path"] in (None, path)
    }


def spread(by_seed: dict[int, float]) -> float:
    """From the lowest seed to the highest."""
    return max(by_seed.values()) - min(by_seed.values())


def differences(cells: dict, stage: str, metric: str) -> dict[int, float]:
    """Fast minus stock, seed by seed."""
    stock, fast = (values(cells, stage, path, metric) for path in PATHS)
    return {seed: fast[seed] - stock[seed] for seed in sorted(stock.keys() & fast.keys())}


def largest_loss_difference(cells: dict) -> float:
    """Between the paths, over all steps of all stages and seeds that both have."""
    pairs = [(cell, cells.get(name.replace("/stock", "/fast"))) for name, cell in cells.items() if "/stock" in name]
    return max(
        abs(stock - fast)
        for one, other in pairs
        if other
        for (_, stock), (_, fast) in zip(one["losses"], other["losses"], strict=True)
    )


def markdown(cells: dict) -> str:
    """One row a metric and path, then what lies between the paths, and the teacher."""
    lines = ["| | " + " | ".join(STAGES.values()) + " |", "|---|" + "---|" * len(STAGES)]
    for metric, title in METRICS.items():
        for path in PATHS:
            entries = [_entry(values(cells, stage, path, metric)) for stage in STAGES]
            lines.append(f"| {title}, {path} | " + " | ".join(entries) + " |")
        entries = [_difference(differences(cells, stage, metric)) for stage in list(STAGES)[1:]]
        lines.append(f"| {title}, fast - stock | | " + " | ".join(entries) + " |")
    for cell in cells.values():
        if cell["cell"]["stage"] == "teacher":
            scores = ", ".join(f"{title} {cell[metric]:.4f}" for metric, title in METRICS.items())
            lines += ["", f"The teacher: {scores}."]
    if values(cells, "contrastive", "stock", "ndcg@10") and values(cells, "contrastive", "fast", "ndcg@10"):
        lines += ["", f"The losses of a step differ by at most {largest_loss_difference(cells):.1e} between the paths."]
    return "\n".join(lines)


def _entry(by_seed: dict[int, float]) -> str:
    return f"{mean(by_seed.values()):.4f} (spread {spread(by_seed):.4f})" if by_seed else ""


def _difference(by_seed: dict[int, float]) -> str:
    if not by_seed:
        return ""
    return f"{mean(by_seed.values()):+.4f} (by seed " + ", ".join(f"{value:+.4f}" for value in by_seed.values()) + ")"
