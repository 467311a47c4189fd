"""How many times as fast one run is as another, and whether the machine was busy with something else."""

from __future__ import annotations

import statistics
from typing import Any

from pylate_fastmaxsim.comparison.runs import contrast, summarize
from pylate_fastmaxsim.comparison.turns import Run, Turns

# How far apart the quartiles of the ratios may be, relative to their median.
SPREAD = 0.15
# How far the ratio of CPU seconds may be from that of wall seconds, on a CPU.
CPU_DIFFERENCE = 0.2


def verdict(stock: Run, fast: Run) -> dict[str, Any] | None:
    """Compare the blocks of two runs that stood beside each other; None if there are none.

    Returns
    -------
    ``ratio``: the median of the ratios of seconds, stock over fast, one for each of the ``pairs``; ``quartiles`` of these
    ratios; ``cpu_ratio``, the median of the same of CPU seconds (None where a block took none); ``busy``, and then
    ``why_busy``, a sentence.

    Examples
    --------
    >>> from pylate_fastmaxsim.comparison.turns import Run
    >>> from pylate_fastmaxsim.comparison.verdict import verdict
    >>> def run(*seconds):
    ...     return Run(device="cpu", blocks=[
    ...         {"seconds": each, "cpu_seconds": 1.9 * each, "steps": 3, "pair": pair} for pair, each in enumerate(seconds)
    ...     ])
    >>> verdict(run(4.0, 4.2, 8.0), run(2.0, 2.1, 4.1))["ratio"]  # the load doubled, for both
    2.0
    """
    pairs = _pairs(stock, fast)
    if not pairs:
        return None
    ratios = [first["seconds"] / second["seconds"] for first, second in pairs]
    ratio = statistics.median(ratios)
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else [ratio] * 3
    measurable = all(block["cpu_seconds"] > 0 for pair in pairs for block in pair)
    cpu_ratio = statistics.median(a["cpu_seconds"] / b["cpu_seconds"] for a, b in pairs) if measurable else None
    why = None
    if high - low > SPREAD * ratio:
        why = f"half of the {len(pairs)} pairs of blocks have ratios from {low:.2f} to {high:.2f}"
    elif stock.device == "cpu" and cpu_ratio is not None and abs(cpu_ratio / ratio - 1) > CPU_DIFFERENCE:
        why = f"the ratio of CPU seconds is {cpu_ratio:.1f}, that of wall seconds {ratio:.1f}"
    return {
        "ratio": ratio,
        "quartiles": [low, high],
        "pairs": len(pairs),
        "cpu_ratio": cpu_ratio,
        "busy": why is not None,
        "why_busy": why and f"The machine was busy with something else: {why}.",
    }


def _pairs(stock: Run, fast: Run) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The blocks of both that stood beside each other and took the same steps."""
    others = {block["pair"]: block for block in fast.blocks if block["pair"] is not None}
    pairs = [(block, others[block["pair"]]) for block in stock.blocks if block["pair"] in others]
    return [pair for pair in pairs if pair[0]["steps"] == pair[1]["steps"]]


def summary_of(run: Run) -> dict[str, Any]:
    """A run in numbers, for the report: :func:`~pylate_fastmaxsim.comparison.runs.summarize` of what it reported."""
    memory = {"memory": run.memory} if run.memory else {}
    steps = run.steps
    if not all("seconds" in step for step in steps):
        # Not timed one by one: each is as long as its block on average.
        means = [block["seconds"] / block["steps"] for block in run.blocks for _ in range(block["steps"])]
        steps = [{"seconds": mean, **step} for mean, step in zip(means, steps, strict=True)]
    summary = summarize({"status": run.status, **memory, **run.result}, steps)
    counted = [block for block in run.blocks if block["pair"] is not None]
    if counted:
        steps = sum(block["steps"] for block in counted)
        summary["cpu_step_seconds"] = sum(block["cpu_seconds"] for block in counted) / steps
    return summary | {"blocks": run.blocks}


def compared_runs(turns: Turns) -> dict[str, Any]:
    """What the report of a comparison takes, but for ``recipe``: ``runs``, stock and fast, and their ``summary``.

    In the ``summary``, ``turns`` is the :func:`verdict`, ``speedup`` its ratio (None without one), ``restarted`` as in
    :class:`~pylate_fastmaxsim.comparison.turns.Turns`, and ``wall_seconds`` how long each run had its turn.
    """
    runs = {name: summary_of(run) for name, run in turns.runs.items()}
    judged = verdict(turns.runs["stock"], turns.runs["fast"])
    summary = contrast(runs["stock"], runs["fast"])
    if summary["speedup"] is not None:
        # Not of a warm-up, which is no pair of blocks.
        summary["speedup"] = judged and judged["ratio"]
    wall = {name: run.wall_seconds for name, run in turns.runs.items()}
    return {"runs": runs, "summary": {**summary, "turns": judged, "restarted": turns.restarted, "wall_seconds": wall}}
