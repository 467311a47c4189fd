"""Runs in numbers, how many times as fast one is as another, and whether the machine was busy with something else."""

import math
import statistics
from itertools import product
from typing import Any

from pylate_fastmaxsim.comparison.turns import FINISHED, WARM_UP_STEPS, Run, Turns

STOCK, FAST = MODES = ("stock", "fast")
# How a point of a sweep ends, beside those of every run.
NO_BATCH = "no batch of this size"
NOT_RUN = "not run"
PHASES = ("tokenise", "encode", "score", "backward", "optimise")

_OF_STEPS = ("step_seconds", "documents_per_second", "live_tokens_per_second")
# How far apart the quartiles of the ratios may be, relative to their median.
SPREAD = 0.15
# How far the ratio of CPU seconds may be from that of wall seconds, on a CPU.
CPU_DIFFERENCE = 0.2


def summarize_turns(turns: Turns) -> dict[str, Any]:
    """The content of ``compare.json`` but for ``recipe``: ``runs``, stock and fast, and their ``summary``.

    In the ``summary``, ``turns`` is the :func:`verdict`, ``speedup`` its ratio (None without one), ``restarted`` as in
    :class:`~pylate_fastmaxsim.comparison.turns.Turns`, and ``wall_seconds`` how long each run had its turn. Times of steps
    are left out where the machine was busy and their ratio lies outside of the quartiles of the verdict.
    """
    runs = {mode: summarize_run(turns.runs[mode]) for mode in MODES}
    judged = verdict(*(turns.runs[mode] for mode in MODES))
    summary = contrast(**runs)
    if summary["speedup"] is not None:
        # Not of a warm-up, which is no pair of blocks.
        summary["speedup"] = judged and judged["ratio"]
    if judged is not None and judged["busy"]:
        medians = runs[STOCK]["step_seconds"] / runs[FAST]["step_seconds"]
        low, high = judged["quartiles"]
        if not low <= medians <= high:
            for run, key in product(runs.values(), _OF_STEPS):
                run.pop(key, None)
    wall = {mode: turns.runs[mode].wall_seconds for mode in MODES}
    return {"runs": runs, "summary": {**summary, "turns": judged, "restarted": turns.restarted, "wall_seconds": wall}}


def verdict(stock: Run, fast: Run) -> dict[str, Any] | None:
    """Compare the blocks of two runs that stood beside each other; None if there are none.

    ``ratio`` is the median of the ratios of seconds, stock over fast, one for each of the ``pairs``, with the
    ``quartiles`` of these; ``cpu_ratio`` the median of the same of CPU seconds (None where a block took none). Where the
    machine was ``busy``, ``why_busy`` is a sentence.
    """
    others = {block["pair"]: block for block in fast.counted_blocks}
    pairs = [(block, others[block["pair"]]) for block in stock.counted_blocks if block["pair"] in others]
    pairs = [pair for pair in pairs if pair[0]["steps"] == pair[1]["steps"]]
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


def timed_steps(run: Run) -> list[dict[str, Any]]:
    """The steps of a run with their ``seconds``: those of a block are as long as the block on average."""
    seconds = [block["seconds"] / block["steps"] for block in run.blocks for _ in range(block["steps"])]
    # Steps are those of the first start, and so are the first blocks.
    return [{**step, "seconds": mean} for step, mean in zip(run.steps, seconds, strict=False)]


def summarize_run(run: Run) -> dict[str, Any]:
    """A run in numbers: :func:`summarize_steps` of its steps, what its process reported, and its blocks."""
    memory = {"memory": run.memory} if run.memory else {}
    summary = {"status": run.status, **memory, **run.result, **summarize_steps(timed_steps(run)), "blocks": run.blocks}
    if counted := run.counted_blocks:
        steps = sum(block["steps"] for block in counted)
        summary["cpu_step_seconds"] = sum(block["cpu_seconds"] for block in counted) / steps
    return summary


def summarize_steps(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Steps in numbers. Times and rates leave out the warm-up: the first 5 steps, at most a third of all.

    A step is a dictionary of ``seconds`` and, where they are known, ``loss``, the numbers ``documents``, ``live`` (tokens
    of documents), ``query_tokens``, and ``encoded`` (tokens that the encoder was given).
    """
    summary = {"steps": len(steps), "losses": [step["loss"] for step in steps if "loss" in step]}
    measured = steps[min(WARM_UP_STEPS, len(steps) // 3) :]
    if not measured:
        return summary
    summary["step_seconds"] = statistics.median(step["seconds"] for step in measured)
    if "live" in steps[0]:
        seconds = sum(step["seconds"] for step in measured)
        summary["documents_per_second"] = sum(step["documents"] for step in measured) / seconds
        summary["live_tokens_per_second"] = sum(step["live"] for step in measured) / seconds
    if "encoded" in steps[0]:
        live, encoded, queries = (sum(step[name] for step in steps) for name in ("live", "encoded", "query_tokens"))
        padding = encoded - queries - live
        summary["padding"] = padding / (encoded - queries)
        totals = {"queries": queries, "documents": live, "padding": padding}
        summary["tokens_per_step"] = {name: total / len(steps) for name, total in totals.items()}
    return summary


def contrast(stock: dict[str, Any], fast: dict[str, Any]) -> dict[str, Any]:
    """The fast run relative to the stock run; None for what is unknown because a run did not finish.

    ``loss_difference_nan_from`` is the first step at which the losses differ by no finite number, as they do where one
    of them is NaN or infinite; then ``largest_loss_difference`` is NaN, whatever lies before and behind.
    """
    both = stock["status"] == fast["status"] == FINISHED
    differences = [abs(a - b) for a, b in zip(stock["losses"], fast["losses"], strict=False)]
    qualities = [run.get("ndcg@10") for run in (stock, fast)] if both else [None, None]
    nan_from = next((step for step, gap in enumerate(differences, start=1) if not math.isfinite(gap)), None)
    return {
        "speedup": stock["step_seconds"] / fast["step_seconds"] if both else None,
        "peak_memory": fast["memory"]["peak"] / stock["memory"]["peak"] if both else None,
        "largest_loss_difference": max(differences, default=None) if nan_from is None else math.nan,
        "loss_difference_nan_from": nan_from,
        # None for a run that diverged.
        "ndcg@10_difference": None if None in qualities else qualities[1] - qualities[0],
    }
