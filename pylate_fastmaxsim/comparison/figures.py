"""Figures of a comparison: losses, bars of time and memory, phases, tokens and batch sizes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pylate_fastmaxsim.comparison.turns import FINISHED, OUT_OF_MEMORY
from pylate_fastmaxsim.comparison.verdict import PHASES
from pylate_fastmaxsim.reporting.figures import hide_frame
from pylate_fastmaxsim.reporting.numbers import GIBIBYTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABELS = {"stock": "stock", "fast": "pylate-fastmaxsim"}
COLORS = {"stock": "#9aa0a6", "fast": "#d9480f"}
LINES = {"stock": {"linewidth": 3.5, "alpha": 0.8}, "fast": {"linewidth": 1.3}}
PHASE_COLORS = dict(zip(PHASES, ("#74b816", "#1c7ed6", "#d9480f", "#7048e8", "#868e96"), strict=True))
TOKEN_COLORS = {"documents": "#1c7ed6", "queries": "#99c9ef", "padding": "#dee2e6"}
# Of the bars that are cut into parts: the colours of these, and the title.
STACKED = {
    "phases": (PHASE_COLORS, "seconds of a step"),
    "tokens_per_step": (TOKEN_COLORS, "tokens that the encoder computed in a step"),
}


def draw_overview(runs: dict[str, Any], figure: Figure) -> None:
    """Loss curves on the left; step time, peak memory and, where it is known, padding as bars on the right."""
    padding = {mode: 100 * run["padding"] for mode, run in runs.items() if "padding" in run}
    bars = 3 if padding else 2
    grid = figure.add_gridspec(1, 1 + bars, width_ratios=[3.2, *[1] * bars])
    losses, time, memory, *rest = (figure.add_subplot(place) for place in grid)
    _draw_losses(losses, runs)
    seconds = {mode: run["step_seconds"] for mode, run in runs.items() if "step_seconds" in run}
    _draw_bars(time, "median step (s)", runs, seconds)
    held = {mode: run["memory"] for mode, run in runs.items() if "memory" in run}
    peak, before = ({mode: each[key] / GIBIBYTE for mode, each in held.items()} for key in ("peak", "before"))
    _draw_bars(memory, "peak memory (GiB)\npale: before training", runs, peak, before)
    for axes in rest:
        _draw_bars(axes, "padding in documents\nencoded (%)", runs, padding)


def draw_sweep(points: dict[str, list[dict[str, Any]]], capacity: int | None, figure: Figure) -> None:
    """Step time and peak memory against batch size; a cross is the first size that ran out of memory.

    ``capacity`` is how much memory the device has, in bytes.
    """
    time, memory = figure.subplots(1, 2)
    _draw_points(time, "median step (s)", points, lambda point: point["step_seconds"])
    _draw_points(memory, "peak memory (GiB)", points, lambda point: point["memory"]["peak"] / GIBIBYTE)
    if capacity is not None:
        memory.axhline(capacity / GIBIBYTE, color="#868e96", linestyle=":", linewidth=1)
    time.legend(frameon=False, loc="upper left")


def draw_stacked(key: str, runs: dict[str, Any], figure: Figure) -> None:
    """One bar per run, cut into what it has of ``key``, one of STACKED."""
    colors, title = STACKED[key]
    parts = {mode: run[key] for mode, run in runs.items() if key in run}
    axes = figure.add_subplot()
    for place, values in enumerate(parts.values()):
        begin = 0.0
        for name, color in colors.items():
            label = name if place == 0 else None
            axes.barh(place, values[name], left=begin, color=color, label=label, height=0.6)
            begin += values[name]
    axes.set_yticks(range(len(parts)), list(parts))
    axes.set_ylim(len(parts) - 0.5, -0.5)
    axes.set_xlabel(title)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    figure.legend(loc="outside upper left", ncols=len(colors), frameon=False)
    hide_frame(axes)


def _draw_points(
    axes: Axes,
    title: str,
    points: dict[str, list[dict[str, Any]]],
    value: Callable[[dict[str, Any]], float],
) -> None:
    sizes = [point["batch_size"] for point in next(iter(points.values()))]
    # Evenly spaced: sizes are few, and often powers of two.
    for mode, row in points.items():
        fitting = [(place, value(point)) for place, point in enumerate(row) if point["status"] == FINISHED]
        axes.plot(*zip(*fitting, strict=True) if fitting else ((), ()), "o-", color=COLORS[mode], label=LABELS[mode])
        for place, point in enumerate(row):
            if point["status"] == OUT_OF_MEMORY:
                # On the upper edge, beyond what was measured.
                edge = axes.get_xaxis_transform()
                axes.plot(place, 0.97, "x", color=COLORS[mode], markersize=10, markeredgewidth=2.5, transform=edge)
                offset = {"stock": 0.91, "fast": 0.85}[mode]
                axes.text(place, offset, "out of memory", color=COLORS[mode], ha="center", va="top", transform=edge)
    axes.set_xticks(range(len(sizes)), [f"{size:,}" for size in sizes])
    axes.set_xlim(-0.4, len(sizes) - 0.6)
    axes.set_ylim(0, 1.25 * axes.get_ylim()[1])
    axes.set(xlabel="batch size", title=title)
    hide_frame(axes)


def _draw_losses(axes: Axes, runs: dict[str, Any]) -> None:
    from matplotlib.ticker import MaxNLocator

    for mode, run in runs.items():
        score = run.get("ndcg@10")
        label = LABELS[mode] + ("" if score is None else f", nDCG@10 {score:.3f}")
        losses = [math.nan if loss is None else loss for loss in run["losses"]]
        axes.plot(range(1, len(losses) + 1), losses, color=COLORS[mode], label=label, **LINES[mode])
    axes.set(xlabel="step", ylabel="training loss")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False)
    hide_frame(axes)


def _draw_bars(
    axes: Axes, title: str, runs: dict[str, Any], values: dict[str, float], pale: dict[str, float] | None = None
) -> None:
    """One bar per run, its lower part pale up to ``pale``; a run without a value says why instead."""
    for place, (mode, run) in enumerate(runs.items()):
        if run["status"] != FINISHED or mode not in values:
            why = run["status"] if run["status"] != FINISHED else "not measured"
            axes.text(place, 0, f" {why}", rotation=90, ha="center", va="bottom", color=COLORS[mode])
            continue
        axes.bar(place, values[mode], width=0.65, color=COLORS[mode])
        if pale:
            axes.bar(place, pale[mode], width=0.65, color="white", alpha=0.6)
        axes.text(place, values[mode], f"{values[mode]:.3g}", ha="center", va="bottom")
    axes.set_title(title, fontsize=10)
    axes.set_xticks(range(len(runs)), list(runs))
    axes.set_xlim(-0.6, len(runs) - 0.4)
    axes.set_ylim(0, 1.12 * max(values.values(), default=0) or 1)
    axes.set_yticks([])
    hide_frame(axes, "left")
