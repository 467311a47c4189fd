"""The plots of the operator benchmark: speed, memory, roofline, scaling."""

from __future__ import annotations

from pathlib import Path

import matplotlib

from benchmarks.harness.plots import plt
from benchmarks.operators.results import PEERS, TITLES, Results

COLOURS = {"fast": "#d62728", "lik": "#1f77b4", "flash": "#2ca02c", "einsum": "#555555", "compile": "#b8860b"}
GROUPS = ("tiny", "in-batch", "ColPali", "KD", "rerank", "ragged", "fp16")
MEASURES = {"forward": "forward", "forward_backward": "forward + backward"}


def save(figure: plt.Figure, target: Path, kind: str) -> None:
    figure.savefig(target.with_name(f"{target.stem}_{kind}.png"), dpi=130, bbox_inches="tight")
    plt.close(figure)


def bars(results: Results, target: Path, kind: str, label: str, value, log: bool) -> None:
    """One group of bars a shape, one panel a measure; ``value(shape, competitor, measure)`` may be ``None``."""
    shapes = [shape for group in GROUPS for shape in results.group(group)]
    figure, axes = plt.subplots(2, 1, figsize=(11, 8), squeeze=False)
    for axis, (measure, title) in zip(axes[:, 0], MEASURES.items(), strict=True):
        shown = [shape for shape in shapes if shape.backward or measure == "forward"]
        for index, competitor in enumerate(COLOURS):
            points = [(i, y) for i, shape in enumerate(shown) if (y := value(shape, competitor, measure))]
            places = [i + (index - 2) * 0.16 for i, _ in points]
            axis.bar(places, [y for _, y in points], 0.15, color=COLOURS[competitor], label=TITLES[competitor])
        names = [shape.name for shape in shown]
        axis.set_xticks(range(len(names)), names, rotation=20, ha="right", fontsize=9)
        axis.set(ylabel=label, title=title)
        axis.grid(alpha=0.3, axis="y")
        if log:
            axis.set_yscale("log")
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="lower center", fontsize=9, frameon=False, ncols=5)
    save(figure, target, kind)


def plot_speed(results: Results, target: Path) -> None:
    def speed(shape, competitor, measure):
        peer, ms = results.best_peer(shape, measure), results.milliseconds(shape, competitor, measure)
        return peer and ms and peer[1]["ms"] / ms

    bars(results, target, "speed", "speed, best peer = 1", speed, log=False)


def plot_memory(results: Results, target: Path) -> None:
    def memory(shape, competitor, measure):
        best = results.best(shape, competitor, measure)
        return best and best["peak_bytes"] and best["peak_bytes"] / 2**20

    bars(results, target, "memory", "peak extra memory (MiB)", memory, log=True)


def plot_roofline(results: Results, target: Path) -> None:
    """Operations a second of the 16-bit forwards against operations a byte, under the measured ceilings."""
    shapes = [shape for shape in results.shapes if shape.dtype != "float32" and shape.group != "sweep"]
    figure, axis = plt.subplots(figsize=(9, 6))
    run = list(results.cells.values())[-1]["environment"]["ceilings"]
    rate, bandwidth = run["matmul_flops_per_s"]["bfloat16"], run["copy_bytes_per_s"]
    intensities = [shape.flops() / shape.bytes("forward") for shape in shapes]
    ridge = rate / bandwidth
    edges = [min([*intensities, ridge]) / 2, ridge, max([*intensities, ridge]) * 2]
    roof = [min(rate, x * bandwidth) / 1e12 for x in edges]
    size = run["matmul_size"]
    axis.plot(edges, roof, "k-", label=f"measured: copy, and bf16 product of {size} cubed")
    for competitor in ("fast", *PEERS):
        points = []
        for shape, x in zip(shapes, intensities, strict=True):
            ms = results.milliseconds(shape, competitor, "forward")
            if ms:
                points.append((x, shape.flops() / (ms / 1e3) / 1e12))
        if points:
            marker = "o" if competitor == "fast" else "."
            axis.plot(*zip(*points, strict=True), marker, color=COLOURS[competitor], label=TITLES[competitor])
    axis.set(xscale="log", yscale="log", xlabel="operations per byte of inputs and scores", ylabel="Tflop/s, forward")
    axis.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(matplotlib.ticker.ScalarFormatter())
    axis.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    axis.grid(alpha=0.3, which="both")
    axis.legend(fontsize=8, frameon=False)
    save(figure, target, "roofline")


def plot_scaling(results: Results, target: Path) -> None:
    """Time of a call against Nq, Nd and Ld, with the straight line through its largest size."""
    sweeps = results.sweeps()
    figure, axes = plt.subplots(1, len(sweeps), figsize=(4.5 * len(sweeps), 4), squeeze=False)
    for axis, (name, points) in zip(axes[0], sweeps.items(), strict=True):
        for measure, style in zip(MEASURES, ("o-", "s--"), strict=True):
            timed = [(n, ms) for n, shape in points if (ms := results.milliseconds(shape, "fast", measure))]
            if not timed:
                continue
            axis.plot(*zip(*timed, strict=True), style, color=COLOURS["fast"], label=MEASURES[measure])
            slope = timed[-1][1] / timed[-1][0]
            axis.plot([n for n, _ in timed], [n * slope for n, _ in timed], ":", color="#999999")
        axis.set(xscale="log", yscale="log", xlabel=name, ylabel="ms")
        axis.set_xticks([n for n, _ in points], [str(n) for n, _ in points], fontsize=8)
        axis.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
        axis.grid(alpha=0.3)
    axes[0, 0].legend(fontsize=8, frameon=False)
    figure.tight_layout()
    save(figure, target, "scaling")


def plot_all(content: dict, target: Path) -> None:
    """Every plot that the results have figures for, beside the results file."""
    results = Results(content)
    if any(results.group(group) for group in GROUPS):
        plot_speed(results, target)
        if any(results.milliseconds(shape, "fast", "forward") for shape in results.shapes if shape.dtype != "float32"):
            plot_roofline(results, target)
    measured = (results.best(s, c, "forward") for s in results.shapes for c in s.competitors)
    if any(best and best["peak_bytes"] for best in measured):
        plot_memory(results, target)
    if results.sweeps():
        plot_scaling(results, target)
