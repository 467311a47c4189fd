"""Markdown table of the Cranfield benchmark: means and spreads over seeds, and differences of fast from stock."""

from __future__ import annotations

from statistics import mean

from benchmarks.harness.tables import table

STAGES = {"untrained": "untrained", "contrastive": "after contrastive training", "distilled": "after mining and KD"}
METRICS = {"ndcg@10": "nDCG@10", "mrr@10": "MRR@10", "recall@100": "Recall@100"}
PATHS = ("stock", "fast")


def values(cells: dict, stage: str, path: str, metric: str) -> dict[int, float]:
    """A metric by seed. Both paths share the untrained model."""
    return {
        cell["cell"]["seed"]: cell[metric]
        for cell in cells.values()
        if cell["cell"]["stage"] == stage and cell["cell"]["path"] in (None, path)
    }


def spread(by_seed: dict[int, float]) -> float:
    """The difference between the best and the worst seed."""
    return max(by_seed.values()) - min(by_seed.values())


def largest_difference(cells: dict, stage: str, metric: str) -> float | None:
    """Between fast and stock of the same seed; None where no seed has both."""
    stock, fast = (values(cells, stage, path, metric) for path in PATHS)
    return max((abs(fast[seed] - stock[seed]) for seed in stock.keys() & fast.keys()), default=None)


def largest_loss_difference(cells: dict) -> float | None:
    """Between fast and stock, over all steps of all stages and seeds; None where no seed has both."""
    stock = {name: cell for name, cell in cells.items() if cell["cell"]["path"] == "stock"}
    pairs = [(cell["losses"], cells.get(name.replace("stock", "fast"))) for name, cell in stock.items()]
    return max(
        (
            abs(one - other)
            for losses, fast in pairs
            if fast
            for (_, one), (_, other) in zip(losses, fast["losses"], strict=True)
        ),
        default=None,
    )


def markdown(cells: dict) -> str:
    """Rows for each metric: both paths and their largest difference; then the seeds and the teacher."""
    rows = []
    for metric, title in METRICS.items():
        for path in PATHS:
            entries = [_mean_and_spread(values(cells, stage, path, metric)) for stage in STAGES]
            rows.append([f"{title}, {path}", *entries])
        gaps = [largest_difference(cells, stage, metric) for stage in list(STAGES)[1:]]
        entries = ["" if gap is None else f"{gap:.4f}" for gap in gaps]
        rows.append([f"{title}, fast against stock at most", "", *entries])
    lines = [table(["", *STAGES.values()], rows)]
    by_stage = [values(cells, stage, "fast", "ndcg@10") for stage in STAGES]
    if all(by_stage):
        seeds = [", ".join(f"{by_seed[seed]:.4f}" for by_seed in by_stage) for seed in by_stage[-1]]
        lines += ["", "nDCG@10 of each seed, fast, from stage to stage: " + "; ".join(seeds) + "."]
    for cell in cells.values():
        if cell["cell"]["stage"] == "teacher":
            scores = ", ".join(f"{title} {cell[metric]:.4f}" for metric, title in METRICS.items())
            lines += ["", f"The teacher: {scores}."]
    gap = largest_loss_difference(cells)
    if gap is not None:
        lines += ["", f"The losses of a step differ by at most {gap:.1e} between the paths."]
    return "\n".join(lines)


def _mean_and_spread(by_seed: dict[int, float]) -> str:
    return f"{mean(by_seed.values()):.4f} (spread {spread(by_seed):.4f})" if by_seed else ""
