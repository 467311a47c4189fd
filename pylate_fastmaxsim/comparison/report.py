"""Results as tables for the terminal, and numbers as text."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pylate_fastmaxsim.comparison.runs import FINISHED, PHASES

if TYPE_CHECKING:
    from rich.table import Table

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


def comparison_rows(comparison: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """What is measured, stock, fast, and fast against stock; the first row is the header.

    Without what no run has, as a script that is compared has no evaluation.
    """
    stock, fast = runs = comparison["runs"]["stock"], comparison["runs"]["fast"]
    summary = comparison["summary"]
    cpu_ratio = (summary.get("turns") or {}).get("cpu_ratio")

    def row(title: str, values: Iterable[str], ratio: str = "") -> tuple[str, str, str, str]:
        return title, *values, ratio

    def measured(title: str, key: str, pattern: str, ratio: str = "") -> tuple[str, str, str, str]:
        return row(title, (_cell(run, key, pattern) for run in runs), ratio)

    rows = [
        measured("median step", "step_seconds", "{:.3f} s", speed(summary)),
        measured("  CPU time", "cpu_step_seconds", "{:.3f} s", form("{:.2g}x", cpu_ratio)),
        *(row(f"  {phase}", (form("{:.3f} s", run.get("phases", {}).get(phase)) for run in runs)) for phase in PHASES),
        row("peak memory", (memory(run, "peak") for run in runs), form("{:.0%}", summary["peak_memory"])),
        row("  before training", (memory(run, "before") for run in runs)),
        row("  held by PyTorch's allocator", (memory(run, "held") for run in runs)),
        row("whole run, wall clock", (form("{:.1f} s", summary.get("wall_seconds", {}).get(mode)) for mode in LABELS)),
        measured("documents per second", "documents_per_second", "{:,.0f}"),
        measured("live tokens per second", "live_tokens_per_second", "{:,.0f}"),
        measured("padding in documents encoded", "padding", "{:.0%}"),
        row("last loss", (final_loss(run) for run in runs)),
    ]
    for key, title in METRICS.items():
        ratio = form("{:+.4f}", summary.get("ndcg@10_difference")) if key == "ndcg@10" else ""
        rows.append(measured(title, key, "{:.4f}", ratio))
        if any(key in run for run in runs):
            untrained = form("{:.4f}", fast.get("untrained", {}).get(key))
            rows.append(row("  before training", (untrained, untrained)))
    return [("", *LABELS, "fast / stock"), *(row for row in rows if set(row[1:3]) != {"-"})]


def title(comparison: dict[str, Any]) -> str:
    """What was compared, and on which device."""
    return f"{comparison['recipe']['name']} on {device(comparison)}"


def comparison_table(comparison: dict[str, Any]) -> Table:
    """:func:`comparison_rows` as a table for the terminal; needs rich."""
    return _table(title(comparison), comparison_rows(comparison), caption(comparison))


def comparison_text(comparison: dict[str, Any]) -> str:
    """:func:`comparison_rows` in aligned columns, where there is no rich."""
    rows = comparison_rows(comparison)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
    return "\n".join([title(comparison), *(line.rstrip() for line in lines), caption(comparison)])


def _table(title: str, rows: list[tuple[str, ...]], caption: str | None = None) -> Table:
    """The first row is the header; its first column is of titles where it has no name."""
    from rich.table import Table

    head, *body = rows
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for name in head:
        table.add_column(name, justify="right" if name else "left")
    for row in body:
        table.add_row(*row)
    return table


def caption(comparison: dict[str, Any]) -> str:
    """A few sentences on what the numbers mean, how close the losses are and how long the comparison took."""
    summary = comparison["summary"]
    steps = min(run["steps"] for run in comparison["runs"].values())
    difference, nan_from = summary["largest_loss_difference"], summary["loss_difference_nan_from"]
    largest = f"NaN, first at step {nan_from}" if nan_from is not None else form("{:.2g}", difference)
    curves = "" if largest == "-" else f" Largest difference of the loss curves over {steps} steps: {largest}."
    before = ", before evaluation" if "model" in comparison["recipe"] else ""  # not of a script
    measure = "allocated on the GPU" if "CPU" not in device(comparison) else "resident in the process"
    whole = form(" The whole comparison took {:.0f} s.", summary.get("wall_seconds", {}).get("whole"))
    return (
        f"{_on_the_turns(summary)}Steps after warm-up, data loading included; memory {measure}{before}.{curves}"
        f"{'' if whole == '-' else whole}{_on_the_pooling(comparison['recipe'])}"
        f"{_on_the_allocator(comparison['runs'].values())}"
    )


def _on_the_turns(summary: dict[str, Any]) -> str:
    """Sentences on how the ratio was measured, and whether the machine was busy."""
    turns = summary.get("turns")
    if turns is None:
        return ""
    low, high = turns["quartiles"]
    pairs = "1 pair" if turns["pairs"] == 1 else f"{turns['pairs']} pairs"
    how = (
        "The device does not take both processes at once, so each was started alone, in turns. "
        if summary["restarted"]
        else ""
    )
    if turns["busy"]:
        return f"{turns['why_busy']} There is no verdict on the speed; the ratio was about {turns['ratio']:.2g}. {how}"
    spread = f", half of them from {low:.2f} to {high:.2f}" if turns["pairs"] > 1 else ""
    return f"{how}Speed: the median ratio of {pairs} of blocks that stood beside each other{spread}. "


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


def memory(run: dict[str, Any], key: str) -> str:
    """A value of a run's memory as text, or a dash if there is none."""
    if run["status"] != FINISHED or key not in run["memory"]:
        return "-"
    value = run["memory"][key]
    return f"{value / GIBIBYTE:.1f} GiB" if value >= 10 * GIBIBYTE else f"{value / MEBIBYTE:,.0f} MiB"


def form(pattern: str, value: float | None) -> str:
    """A number as text, or a dash for None."""
    return "-" if value is None else pattern.format(value)


def busy(summary: dict[str, Any]) -> bool:
    """Whether the machine had other work, so that there is no verdict."""
    return bool((summary.get("turns") or {}).get("busy"))


def speed(summary: dict[str, Any]) -> str:
    """How many times as fast a run is as stock; of a busy machine only the ratio, rounded."""
    if summary["speedup"] is None:
        return "-"
    return f"{summary['speedup']:.2g} (busy)" if busy(summary) else f"{summary['speedup']:.2f}x as fast"


def headline(comparison: dict[str, Any]) -> str:
    """The title of the overview."""
    summary = comparison["summary"]
    if summary["speedup"] is None:
        gone = " and ".join(LABELS[mode] for mode, run in comparison["runs"].items() if run["status"] != FINISHED)
        return f"{title(comparison)}: {f'{gone} ran out of memory' if gone else 'too few steps for a verdict on the speed'}"
    step = "no verdict on the speed, the machine was busy" if busy(summary) else f"{speed(summary)} per step"
    return f"{title(comparison)}: {step}, {summary['peak_memory']:.0%} of the peak memory"


def sweep_rows(points: dict[str, list[dict[str, Any]]]) -> list[tuple[str, ...]]:
    """Step time and peak memory of each batch size, stock and fast; the first row is the header."""
    rows = [("batch size", *(f"{mode}, {what}" for mode in points for what in ("median step", "peak memory")))]
    for row in zip(*points.values(), strict=False):
        cells = [(_cell(point, "step_seconds", "{:.3f} s"), memory(point, "peak")) for point in row]
        rows.append((f"{row[0]['batch_size']:,}", *(text for cell in cells for text in cell)))
    return rows


def sweep_table(points: dict[str, list[dict[str, Any]]]) -> Table:
    """:func:`sweep_rows` as a table for the terminal."""
    return _table("against batch size", sweep_rows(points))
