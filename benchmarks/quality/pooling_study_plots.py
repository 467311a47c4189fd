"""The three panels of the study, a file each: gradients over epochs, recall by length, injection."""

from __future__ import annotations

import itertools
from pathlib import Path
from statistics import mean

from benchmarks.harness.plots import COLOURS, plt
from benchmarks.quality.pooling_study import INJECTED, INJECTION_DIMENSION, KINDS, LENGTHS, POOLINGS
from benchmarks.quality.pooling_study_report import (
    GRADIENTS,
    PLACES,
    PUBLISHED_GINI,
    QUERIES,
    SWEEP_TITLES,
    SWEEPS,
    ginis,
    injected_recall,
    recalls,
)

POOLING_COLOURS = dict(zip(POOLINGS, COLOURS[1:], strict=True))


def plot_all(content: dict, results: Path) -> None:
    """Write the figures beside the results file."""
    for name, draw in {"gini": _gini, "recall": _recall, "injection": _injection}.items():
        figure = draw(content["cells"])
        handles = figure.axes[0].get_legend_handles_labels()
        figure.legend(*handles, loc="lower center", ncols=len(POOLINGS), frameon=False)
        figure.tight_layout(rect=(0, 0.06, 1, 1))
        figure.savefig(results.with_name(f"{results.stem}_{name}.png"), dpi=150)
        plt.close(figure)


def _gini(cells: dict) -> plt.Figure:
    """Lines of the mean over seeds, with the range of seeds; dashed as published."""
    figure, axes = plt.subplots(1, len(GRADIENTS), figsize=(11, 4.5), sharey=True)
    for axis, gradient in zip(axes, GRADIENTS, strict=True):
        for pooling, colour in POOLING_COLOURS.items():
            by_epoch = list(zip(*ginis(cells, pooling, gradient), strict=True))
            epochs = range(1, len(by_epoch) + 1)
            axis.plot(epochs, [*map(mean, by_epoch)], color=colour, label=pooling)
            axis.fill_between(epochs, [*map(min, by_epoch)], [*map(max, by_epoch)], color=colour, alpha=0.2)
            axis.axhline(PUBLISHED_GINI[pooling], color=colour, linestyle="--", linewidth=0.8)
        axis.set(title=f"gradient of the {gradient}", xlabel="epoch")
        axis.grid(alpha=0.3)
    axes[0].set(ylabel="Gini coefficient (dashed: published)", ylim=(0, 1))
    figure.suptitle("Concentration of gradients on the tokens of a positive, M = 64")
    return figure


def _recall(cells: dict) -> plt.Figure:
    figure, axes = plt.subplots(1, len(SWEEPS), figsize=(11, 4.5), sharey=True)
    for axis, sweep in zip(axes, SWEEPS, strict=True):
        for (pooling, colour), (queries, style) in itertools.product(
            POOLING_COLOURS.items(), zip(QUERIES, ("o-", "s:"), strict=True)
        ):
            runs = {tokens: recalls(cells, pooling, tokens, queries, sweep) for tokens in LENGTHS}
            means = {tokens: mean(run) for tokens, run in runs.items() if run}
            label = pooling if queries == QUERIES[0] else None
            axis.plot(means.keys(), means.values(), style, color=colour, label=label)
        axis.set(title=SWEEP_TITLES[sweep])
        axis.set(xlabel="document tokens M", xscale="log")
        axis.set_xticks(LENGTHS, LENGTHS)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set(ylabel="Recall@1")
    figure.suptitle("Recall@1 by document length (solid: training queries, dotted: held-out)")
    return figure


def _injection(cells: dict) -> plt.Figure:
    figure, axes = plt.subplots(len(PLACES), len(KINDS), figsize=(11, 7), sharex=True, sharey=True)
    for row, (where, place) in zip(axes, PLACES.items(), strict=True):
        for axis, kind in zip(row, KINDS, strict=True):
            for pooling, colour in POOLING_COLOURS.items():
                found = injected_recall(cells, pooling, INJECTION_DIMENSION, QUERIES[0], kind, where)
                axis.plot(found.keys(), found.values(), "o-", color=colour, label=pooling)
            axis.set(title=f"{kind},\nin {place}", ylim=(0, 1.02))
            axis.grid(alpha=0.3)
        row[0].set(ylabel="Recall@1")
    for axis in axes[-1]:
        axis.set(xlabel="injected tokens K", xticks=(0, *INJECTED[1:]))
    figure.suptitle(f"Injected tokens, d = {INJECTION_DIMENSION}, M = 64, training queries")
    return figure
