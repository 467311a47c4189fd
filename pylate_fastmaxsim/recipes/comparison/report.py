"""Results as tables for the terminal, and numbers as text."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from rich.table import Table

from pylate_fastmaxsim.recipes.comparison.measure import FINISHED
from pylate_fastmaxsim.recipes.comparison.phases import PHASES
from pylate_fastmaxsim.recipes.training.warmup import Warmed, WarmStep

GIBIBYTE = 2**30
MEBIBYTE = 2**20
METRICS = {
    "ndcg@10": "nDCG@10",
    "mrr@10": "MRR@10",
    "recall@100": "Recall@100",
    "accuracy": "Triplet accuracy",
    "kl_divergence": "KL divergence",
    "flops": "FLOPS",
    "query_nonzeros": "Non-zeros of a query",
    "document_nonzeros": "Non-zeros of a document",
}
LABELS = {"stock": "stock", "fast": "pylate-fastmaxsim"}

# Memory held by PyTorch's allocator over memory in use, from which on the report suggests another setting.
_MUCH_MORE = 1.25


def comparison_table(comparison: dict[str, Any]) -> Table:
    """A table with a column for each run and a row for each measurement."""
    stock, fast = comparison["runs"]["stock"], comparison["runs"]["fast"]
    summary = comparison["summary"]
    table = Table(title=f"{comparison['recipe']['name']} on {device(comparison)}", title_justify="left")
    table.add_column("")
    for name in ("stock", "fast", "fast / stock"):
        table.add_column(name, justify="right")

    def row(title: str, key: str, pattern: str, ratio: str = "") -> None:
        table.add_row(title, *(_cell(run, key, pattern) for run in (stock, fast)), ratio)

    row("median step", "step_seconds", "{:.3f} s", ratio=form("{:.2f}x as fast", summary["speedup"]))
    for phase in PHASES:
        if any("phases" in run for run in (stock, fast)):
            values = [run.get("phases", {}).get(phase) for run in (stock, fast)]
            table.add_row(f"  {phase}", *(form("{:.3f} s", value) for value in values), "")
    table.add_row(
        "peak memory", *(memory(run, "peak") for run in (stock, fast)), form("{:.0%}", summary["peak_memory"])
    )
    table.add_row("  before training", *(memory(run, "before") for run in (stock, fast)), "")
    if holds_more((stock, fast)):
        table.add_row("  held by PyTorch's allocator", *(memory(run, "held") for run in (stock, fast)), "")
    seconds = summary["wall_seconds"]
    table.add_row("whole run, wall clock", *(f"{seconds[mode]:.1f} s" for mode in ("stock", "fast")), "")
    row("documents per second", "documents_per_second", "{:,.0f}")
    row("live tokens per second", "live_tokens_per_second", "{:,.0f}")
    row("padding in documents encoded", "padding", "{:.0%}")
    table.add_row("last loss", *(final_loss(run) for run in (stock, fast)), "")
    for key, title in METRICS.items():
        if any(key in run for run in (stock, fast)):
            ratio = form("{:+.4f}", summary["ndcg@10_difference"]) if key == "ndcg@10" else ""
            row(title, key, "{:.4f}", ratio=ratio)
            if (untrained := fast.get("untrained", {}).get(key)) is not None:
                table.add_row("  before training", *[f"{untrained:.4f}"] * 2, "")
    table.caption = caption(comparison)
    table.caption_justify = "left"
    return table


def caption(comparison: dict[str, Any]) -> str:
    """A few sentences on what the numbers mean, how close the losses are and how long the comparison took."""
    summary = comparison["summary"]
    steps = min(run["steps"] for run in comparison["runs"].values())
    difference, nan_from = summary["largest_loss_difference"], summary["loss_difference_nan_from"]
    largest = f"NaN, first at step {nan_from}" if nan_from is not None else form("{:.2g}", difference)
    curves = "" if largest == "-" else f" Largest difference of the loss curves over {steps} steps: {largest}."
    measure = "allocated on the GPU" if "CPU" not in device(comparison) else "resident in the process"
    return (
        f"Steps after warm-up, data loading included; memory {measure}, before evaluation.{curves} "
        f"The whole comparison took {summary['wall_seconds']['whole']:.0f} s.{_on_the_pooling(comparison['recipe'])}"
        f"{_on_the_allocator(comparison['runs'].values())}"
    )


def _on_the_pooling(recipe: dict[str, Any]) -> str:
    """What the stock run scored with, if the recipe has another pooling than the maximum."""
    if recipe.get("loss", {}).get("pooling") is None:
        return ""
    return (
        " Stock PyLate has no pooling but the maximum: the stock run scored with the same pooling in plain PyTorch (einsum"
        " and a top-k, softmax or log-sum-exp of all similarities), in training and evaluation."
    )


def _on_the_allocator(runs: Iterable[dict[str, Any]]) -> str:
    """A sentence on ``expandable_segments``, if PyTorch's allocator held much more than was in use."""
    memories = [run.get("memory", {}) for run in runs]
    if all(found.get("held", 0) <= _MUCH_MORE * found.get("peak", 0) for found in memories):
        return ""
    return (
        " PyTorch's allocator held much more than was in use, as it does where batches differ in size:"
        " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment avoids most of that."
    )


def warnings_of(comparison: dict[str, Any]) -> list[str]:
    """The warnings of the runs, each with the run that logged it."""
    stock, fast = (comparison["runs"][mode].get("warnings", []) for mode in ("stock", "fast"))
    said = [f"{'both runs' if warning in stock else 'fast run'}: {warning}" for warning in fast]
    return said + [f"stock run: {warning}" for warning in stock if warning not in fast]


def final_loss(run: dict[str, Any]) -> str:
    """The last loss as text: a dash without a step, NaN if it is not finite (null in ``compare.json``)."""
    if not run["losses"]:
        return "-"
    last = run["losses"][-1]
    return "NaN" if last is None or not math.isfinite(last) else f"{last:.4f}"


def device(comparison: dict[str, Any]) -> str:
    """The device of the runs, or unknown if neither recorded it."""
    environments = [run.get("environment") for run in comparison["runs"].values()]
    return next((environment["device"] for environment in environments if environment), "unknown device")


def _cell(run: dict[str, Any], key: str, pattern: str) -> str:
    if run["status"] != FINISHED and key == "step_seconds":
        return run["status"]
    return form(pattern, run.get(key))


def holds_more(runs: Iterable[dict[str, Any]]) -> bool:
    """Whether a run recorded what the allocator held: runs on a GPU that finished."""
    return any("held" in run.get("memory", {}) for run in runs)


def memory(run: dict[str, Any], key: str) -> str:
    """A value of a run's memory as text, or a dash if there is none."""
    if run["status"] != FINISHED or key not in run["memory"]:
        return "-"
    value = run["memory"][key]
    return f"{value / GIBIBYTE:.1f} GiB" if value >= 10 * GIBIBYTE else f"{value / MEBIBYTE:,.0f} MiB"


def form(pattern: str, value: float | None) -> str:
    """A number as text, or a dash for None."""
    return "-" if value is None else pattern.format(value)


def headline(comparison: dict[str, Any]) -> str:
    """The title of the overview."""
    summary, recipe = comparison["summary"], comparison["recipe"]["name"]
    if summary["speedup"] is None:
        gone = " and ".join(LABELS[mode] for mode, run in comparison["runs"].items() if run["status"] != FINISHED)
        return f"{recipe} on {device(comparison)}: {gone} ran out of memory"
    return (
        f"{recipe} on {device(comparison)}: {summary['speedup']:.2f}x as fast per step, "
        f"{summary['peak_memory']:.0%} of the peak memory"
    )


def sweep_rows(points: dict[str, list[dict[str, Any]]]) -> list[tuple[str, ...]]:
    """Step time and peak memory of each batch size, stock and fast; the first row is the header."""
    rows = [("batch size", *(f"{mode}, {what}" for mode in points for what in ("median step", "peak memory")))]
    for row in zip(*points.values(), strict=False):
        cells = [(_cell(point, "step_seconds", "{:.3f} s"), memory(point, "peak")) for point in row]
        rows.append((f"{row[0]['batch_size']:,}", *(text for cell in cells for text in cell)))
    return rows


def sweep_table(points: dict[str, list[dict[str, Any]]]) -> Table:
    """:func:`sweep_rows` as a table for the terminal."""
    head, *rows = sweep_rows(points)
    table = Table(title="against batch size", title_justify="left")
    for title in head:
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def warmup_table(name: str, steps: list[WarmStep]) -> Table:
    """The time of the first step on each size of batch, and of the same step again."""
    table = Table(title=f"{name}: compiled", title_justify="left")
    for column in ("rows in the batch", "first step", "again"):
        table.add_column(column, justify="right")
    for step in steps:
        table.add_row(str(step.rows), f"{step.first:.2f} s", f"{step.again:.2f} s")
    return table


def warmup_counts(warmed: Warmed) -> str:
    """How many kernels are new, and how many of them were compiled before the first step."""
    ahead = warmed.ahead
    return (
        f"{warmed.kernels} new kernels in Triton's cache, {ahead.kernels} of them before the first step, by "
        f"{ahead.processes} processes in {ahead.seconds:.0f} s."
    )


def training_table(result: dict[str, Any]) -> Table:
    """The result of a training run."""
    table = _rows(f"{result['recipe']}: trained")
    losses = result["losses"]
    table.add_row(
        "steps", str(result["steps"]) + (f" (resumed from {result['resumed_from']})" if result["resumed_from"] else "")
    )
    if losses:
        table.add_row("logged loss, first to last", f"{losses[0][1]:.4f} to {losses[-1][1]:.4f}")
    for key, title in METRICS.items():
        if key in result:
            table.add_row(title, form("{:.4f}", result[key]))
    table.add_row("pylate-fastmaxsim", "on" if result["fast"]["enabled"] else f"off ({result['fast']['why_off']})")
    table.add_row("model", result["model"])
    return table


def _rows(title: str) -> Table:
    """A table of names and values, which are wrapped and never cut off."""
    table = Table(title=title, title_justify="left", show_header=False)
    for _ in range(2):
        table.add_column(overflow="fold")
    return table


def mining_table(result: dict[str, Any]) -> Table:
    """The result of mining."""
    table = _rows("mined")
    for name in ("queries", "documents", "rows"):
        table.add_row(name, f"{result[name]:,}")
    table.add_row("pairs without enough negatives", f"{result['left_out']:,}")
    table.add_row("data", result["data"])
    return table
