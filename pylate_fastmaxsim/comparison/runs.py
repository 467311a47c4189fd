"""What a comparison says of a run: how it ended, its steps in a few numbers, and the machine."""

from __future__ import annotations

import logging
import math
import statistics
from typing import Any

FINISHED = "finished"
OUT_OF_MEMORY = "out of memory"
NO_BATCH = "no batch of this size"
NOT_RUN = "not run"

WARM_UP_STEPS = 5
PHASES = ("tokenise", "encode", "score", "backward", "optimise")


def summarize(result: dict[str, Any], steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Summary of a run. Times and rates leave out the warm-up: the first 5 steps, at most a third of all.

    A step is a dictionary of ``seconds`` and, where it is known, ``loss``, and of the numbers ``documents``, ``live`` (tokens of documents),
    ``query_tokens`` and ``encoded`` (tokens that the encoder was given), which only a recipe knows.

    Examples
    --------
    >>> from pylate_fastmaxsim.comparison.runs import summarize
    >>> run = summarize({"status": "finished"}, [{"loss": 1.0, "seconds": 9.0}] + 2 * [{"loss": 0.5, "seconds": 2.0}])
    >>> run["steps"], run["step_seconds"]
    (3, 2.0)
    """
    measured = steps[min(WARM_UP_STEPS, len(steps) // 3) :]
    run = {**result, "steps": len(steps), "losses": [step["loss"] for step in steps if "loss" in step]}
    if not measured:
        return run
    run["step_seconds"] = statistics.median(step["seconds"] for step in measured)
    if "live" not in steps[0]:
        return run
    seconds = sum(step["seconds"] for step in measured)
    run |= {
        "documents_per_second": sum(step["documents"] for step in measured) / seconds,
        "live_tokens_per_second": sum(step["live"] for step in measured) / seconds,
    }
    if "encoded" not in steps[0]:
        return run
    totals = {name: sum(step[name] for step in steps) for name in ("live", "encoded", "query_tokens")}
    return {
        **run,
        "padding": 1 - totals["live"] / (totals["encoded"] - totals["query_tokens"]),
        "tokens_per_step": {
            "queries": totals["query_tokens"] / len(steps),
            "documents": totals["live"] / len(steps),
            "padding": (totals["encoded"] - totals["query_tokens"] - totals["live"]) / len(steps),
        },
    }


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


class KeptWarnings(logging.Handler):
    """Keeps the warnings of a logger, which a comparison shows: ``messages``."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
