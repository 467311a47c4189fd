"""What the published study of pooling says beside what was measured: a table of checks, and plots, means over seeds."""

from __future__ import annotations

import itertools
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from benchmarks.harness.plots import COLOURS, Line, curves
from benchmarks.harness.tables import table
from benchmarks.quality.pooling_study import (
    INJECTED,
    INJECTION_DIMENSION,
    KINDS,
    LENGTHS,
    NEGATIVES,
    PANEL_TOKENS,
    POOLINGS,
    SWEEP_DIMENSION,
)

# Of "Spike hijacking in late-interaction retrieval" (arXiv 2604.05253).
PUBLISHED_GINI = {"max": 0.78, "top-4": 0.45, "softmax": 0.18}
TOLERANCE = 0.03

# Readings of the text.
GRADIENTS = ("score", "loss")
QUERIES = {"training": "training queries", "held_out": "held-out queries"}
SWEEPS = {"evaluated": "trained at M = 64", "retrained": "trained at each M"}
PLACES = {"others": "all but the positive", "all": "all documents"}
COLOUR_OF = dict(zip(POOLINGS, COLOURS[1:], strict=True))


class Check(NamedTuple):
    """Something published in one reading, whether it is so here, and what was measured."""

    published: str
    reading: str
    passed: bool
    measured: str


def seeds_of(
    cells: dict,
    pooling: str,
    tokens: int = PANEL_TOKENS,
    dimension: int = SWEEP_DIMENSION,
    negatives: str | None = None,
) -> list[dict]:
    """The cells of one training, by seed."""
    wanted = {"pooling": pooling, "tokens": tokens, "dimension": dimension, "negatives": negatives}
    found = [cell for cell in cells.values() if wanted.items() <= {"negatives": None, **cell["cell"]}.items()]
    return sorted(found, key=lambda cell: cell["cell"]["seed"])


def recalls(cells: dict, pooling: str, tokens: int, queries: str, sweep: str) -> list[float]:
    """Recall@1 of each seed on documents of M tokens, trained at that M (``retrained``) or at 64 (``evaluated``)."""
    trained_at = tokens if sweep == "retrained" else PANEL_TOKENS
    return [cell["recall"][queries][str(tokens)] for cell in seeds_of(cells, pooling, trained_at)]


def checks(cells: dict) -> list[Check]:
    """All that is measured; what is not yet is left out."""
    found = []
    for gradient in GRADIENTS:
        if all(seeds_of(cells, pooling) for pooling in POOLINGS):
            found.append(
                _levels(
                    f"gradient of the {gradient}",
                    {each: [cell["gini"][gradient] for cell in seeds_of(cells, each)] for each in POOLINGS},
                )
            )
    for queries, sweep in itertools.product(QUERIES, SWEEPS):
        runs = {each: {m: recalls(cells, each, m, queries, sweep) for m in LENGTHS} for each in POOLINGS}
        if all(by_seed for of_pooling in runs.values() for by_seed in of_pooling.values()):
            found.append(_crossing(f"{QUERIES[queries]}, {SWEEPS[sweep]}", runs))
    for hard, queries in itertools.product((None, *NEGATIVES), QUERIES):
        runs = {each: seeds_of(cells, each, negatives=hard) for each in POOLINGS}
        if all(runs.values()):
            means = {each: mean(cell["recall"][queries]["64"] for cell in runs[each]) for each in POOLINGS}
            passed = all(0.33 <= value <= 0.38 for value in means.values())
            reading = f"{QUERIES[queries]}, hard negatives {hard or 'left out'}"
            found.append(Check("Recall@1 of .33 to .38", reading, passed, _slashed(means)))
    return found


def _slashed(values: dict[str, float]) -> str:
    return " / ".join(f"{values[pooling]:.3f}" for pooling in POOLINGS)


def _levels(reading: str, runs: dict[str, list[list[float]]]) -> Check:
    """Gini coefficients of the last epoch are as published."""
    last = {pooling: round(mean(run[-1] for run in seeds), 3) for pooling, seeds in runs.items()}
    passed = all(abs(last[pooling] - PUBLISHED_GINI[pooling]) <= TOLERANCE for pooling in POOLINGS)
    return Check("Gini .78 / .45 / .18, within .03", reading, passed, _slashed(last))


def _crossing(reading: str, runs: dict[str, dict[int, list[float]]]) -> Check:
    """The maximum is ahead of top-4 on the shortest documents and behind on all others, on average over seeds."""
    more = {m: [a - b for a, b in zip(runs["max"][m], runs["top-4"][m], strict=True)] for m in LENGTHS}
    shortest, *longer = (mean(seeds) for seeds in more.values())
    shown = "; ".join(f"M = {m}: {mean(seeds):+.3f}" for m, seeds in more.items())
    return Check("max ahead of top-4 at M = 32, behind at 64 and above", reading, shortest > 0 > max(longer), shown)


def checks_table(content: dict) -> str:
    """Each check in each reading."""
    rows, last = [], ""
    for published, reading, passed, measured in checks(content["cells"]):
        rows.append(["" if published == last else published, reading, "yes" if passed else "no", measured])
        last = published
    return table(["published", "reading", "reproduced", "measured"], rows)


def plot(content: dict, results: Path) -> None:
    """Gradients over epochs, Recall@1 by document length, and injected tokens, a file each beside the results file."""
    cells = content["cells"]
    parts = {
        "gini": ("Concentration of gradients on the tokens of a positive, M = 64 (dashed: published)", _gini(cells), 1),
        "recall": ("Recall@1 by document length (solid: training queries, dotted: held-out)", _recall(cells), 1),
        "injection": (f"Injected tokens, d = {INJECTION_DIMENSION}, M = 64, training queries", _injection(cells), 2),
    }
    for name, (title, panels, rows) in parts.items():
        curves(panels, results.with_name(f"{results.stem}_{name}.png"), title, rows)


def _gini(cells: dict) -> list[tuple[dict, list[Line]]]:
    """The mean over seeds, with the range of seeds."""
    panels = []
    for gradient in GRADIENTS:
        lines = []
        for pooling, colour in COLOUR_OF.items():
            epochs = [*enumerate(zip(*(cell["gini"][gradient] for cell in seeds_of(cells, pooling)), strict=True), 1)]
            band = [(min(each), max(each)) for _, each in epochs]
            lines.append(Line(pooling, colour, [(epoch, mean(each)) for epoch, each in epochs], "-", band))
            lines.append(Line(None, colour, [(epoch, PUBLISHED_GINI[pooling]) for epoch, _ in epochs], "--"))
        axis = {"title": f"gradient of the {gradient}", "xlabel": "epoch", "ylabel": "Gini coefficient", "ylim": (0, 1)}
        panels.append((axis, lines))
    return panels


def _recall(cells: dict) -> list[tuple[dict, list[Line]]]:
    panels = []
    for sweep, title in SWEEPS.items():
        lines = []
        for (pooling, colour), (queries, style) in itertools.product(
            COLOUR_OF.items(), zip(QUERIES, ("o-", "s:"), strict=True)
        ):
            runs = {tokens: recalls(cells, pooling, tokens, queries, sweep) for tokens in LENGTHS}
            points = [(tokens, mean(run)) for tokens, run in runs.items() if run]
            lines.append(Line(pooling if queries == "training" else None, colour, points, style))
        scale = {
            "xscale": "log",
            "xticks": LENGTHS,
            "xlabel": "document tokens M",
            "ylabel": "Recall@1",
            "ylim": (0, 1),
        }
        panels.append(({"title": title, **scale}, lines))
    return panels


def _injection(cells: dict) -> list[tuple[dict, list[Line]]]:
    panels = []
    for (where, place), kind in itertools.product(PLACES.items(), KINDS):
        lines = []
        for pooling, colour in COLOUR_OF.items():
            runs = [cell["injection"] for cell in seeds_of(cells, pooling, dimension=INJECTION_DIMENSION)]
            at = {0: [run["none"] for run in runs], **{k: [run[kind][str(k)][where] for run in runs] for k in INJECTED}}
            lines.append(Line(pooling, colour, [(k, mean(each)) for k, each in at.items() if each]))
        axis = {"title": f"{kind},\nin {place}", "xlabel": "injected tokens K", "ylabel": "Recall@1", "ylim": (0, 1.02)}
        panels.append((axis, lines))
    return panels
