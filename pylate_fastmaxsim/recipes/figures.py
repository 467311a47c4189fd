"""Figures of a comparison that stand alone: losses, bars, phases, padding, and what a batch size costs."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from pylate_fastmaxsim.recipes.measure import FINISHED, OUT_OF_MEMORY
from pylate_fastmaxsim.recipes.phases import PHASES
from pylate_fastmaxsim.recipes.report import COLORS, GIBIBYTE, LABELS, draw_bars, draw_losses, plt

PHASE_COLORS = dict(zip(PHASES, ("#74b816", "#1c7ed6", "#d9480f", "#7048e8", "#868e96"), strict=True))
TOKEN_COLORS = {"documents": "#1c7ed6", "queries": "#99c9ef", "padding": "#dee2e6"}


def svg(draw: Callable[[plt.Figure], None], width: float, height: float) -> str:
    """What ``draw`` puts on a figure of ``width`` x ``height`` inches, as the text of an SVG file."""
    figure = plt.figure(figsize=(width, height), layout="constrained")
    draw(figure)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None}, transparent=True)
    plt.close(figure)
    return text.getvalue()


def losses(runs: dict[str, Any]) -> Callable[[plt.Figure], None]:
    """Both loss curves."""
    return lambda figure: draw_losses(figure.add_subplot(), runs)


def time_and_memory(runs: dict[str, Any]) -> Callable[[plt.Figure], None]:
    """Median step and peak memory as bars."""

    def draw(figure: plt.Figure) -> None:
        left, right = figure.subplots(1, 2)
        seconds = {mode: run["step_seconds"] for mode, run in runs.items() if "step_seconds" in run}
        draw_bars(left, "median step (s)", runs, seconds)
        memory = {mode: run["memory"] for mode, run in runs.items() if "memory" in run}
        peak, before = ({mode: x[key] / GIBIBYTE for mode, x in memory.items()} for key in ("peak", "before"))
        draw_bars(right, "peak memory (GiB), pale: before training", runs, peak, before)

    return draw


def phases(runs: dict[str, Any]) -> Callable[[plt.Figure], None]:
    """One bar per run, cut into the phases of a step."""
    parts = {mode: run["phases"] for mode, run in runs.items() if "phases" in run}
    return _stacked(parts, PHASE_COLORS, "seconds of a step")


def tokens(runs: dict[str, Any]) -> Callable[[plt.Figure], None]:
    """One bar per run: what the encoder was given, and how much of it was padding."""
    parts = {mode: run["tokens_per_step"] for mode, run in runs.items() if "tokens_per_step" in run}
    return _stacked(parts, TOKEN_COLORS, "tokens that the encoder computed in a step")


def _stacked(parts: dict[str, dict[str, float]], colors: dict[str, str], title: str) -> Callable[[plt.Figure], None]:
    def draw(figure: plt.Figure) -> None:
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
        axes.spines[["top", "right"]].set_visible(False)

    return draw


def sweep(points: dict[str, list[dict[str, Any]]], capacity: int | None = None) -> Callable[[plt.Figure], None]:
    """Step time and peak memory against batch size; a cross is the first size that ran out of memory.

    ``capacity`` is how much memory the device has, in bytes.
    """

    def draw(figure: plt.Figure) -> None:
        time, memory = figure.subplots(1, 2)
        _draw_points(time, "median step (s)", points, lambda point: point["step_seconds"])
        _draw_points(memory, "peak memory (GiB)", points, lambda point: point["memory"]["peak"] / GIBIBYTE)
        if capacity is not None:
            memory.axhline(capacity / GIBIBYTE, color="#868e96", linestyle=":", linewidth=1)
        time.legend(frameon=False, loc="upper left")

    return draw


def _draw_points(
    axes: plt.Axes,
    title: str,
    points: dict[str, list[dict[str, Any]]],
    value: Callable[[dict[str, Any]], float],
) -> None:
    sizes = [point["batch_size"] for point in next(iter(points.values()))]
    # Positions and not values: sizes are often powers of two, and few.
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
    axes.spines[["top", "right"]].set_visible(False)
