"""What the published study of pooling says beside what was measured: a table of checks, and plots, means over seeds."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from statistics import mean

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

# Readings of the text.
GRADIENTS = ("score", "loss")
QUERIES = {"training": "training queries", "held_out": "held-out queries"}
SWEEPS = {"evaluated": "trained at M = 64", "retrained": "trained at each M"}
PLACES = {"others": "all but the positive", "all": "all documents"}
COLOUR_OF = dict(zip(POOLINGS, COLOURS[1:], strict=True))


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


def checks_table(content: dict) -> str:
    """What is published beside what was measured in each reading of it, of all that is measured yet."""
    cells, rows = content["cells"], []
    for gradient in GRADIENTS:
        runs = {pooling: seeds_of(cells, pooling) for pooling in POOLINGS}
        if all(runs.values()):
            last = (mean(cell["gini"][gradient][-1] for cell in of_pooling) for of_pooling in runs.values())
            rows.append(["Gini .78 / .45 / .18", f"gradient of the {gradient}", _slashed(last)])
    for queries, sweep in itertools.product(QUERIES, SWEEPS):
        runs = [[recalls(cells, pooling, m, queries, sweep) for m in LENGTHS] for pooling in ("max", "top-4")]
        if all(map(all, runs)):
            more = "; ".join(f"M = {m}: {mean(a) - mean(b):+.3f}" for m, a, b in zip(LENGTHS, *runs, strict=True))
            published = "max ahead of top-4 at M = 32, behind at 64 and above"
            rows.append([published, f"{QUERIES[queries]}, {SWEEPS[sweep]}", more])
    for hard, queries in itertools.product((None, *NEGATIVES), QUERIES):
        runs = {pooling: seeds_of(cells, pooling, negatives=hard) for pooling in POOLINGS}
        if all(runs.values()):
            means = (mean(cell["recall"][queries]["64"] for cell in of_pooling) for of_pooling in runs.values())
            reading = f"{QUERIES[queries]}, hard negatives {hard or 'left out'}"
            rows.append(["Recall@1 of .33 to .38", reading, _slashed(means)])
    return table(["published", "reading", f"measured ({', '.join(POOLINGS)})"], rows)


def _slashed(values: Iterable[float]) -> str:
    return " / ".join(f"{value:.3f}" for value in values)


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
