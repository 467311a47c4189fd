"""What the published study of pooling says beside what was measured: checks, tables, figures.

Tables have means over seeds. What is not measured yet is left out or empty.
"""

from __future__ import annotations

import itertools
from statistics import mean

from benchmarks.harness.tables import table
from benchmarks.quality.pooling_study import (
    INJECTED,
    INJECTION_DIMENSION,
    KINDS,
    LENGTHS,
    PANEL_TOKENS,
    POOLINGS,
    SWEEP_DIMENSION,
)

# Of "Spike hijacking in late-interaction retrieval" (arXiv 2604.05253).
PUBLISHED_GINI = {"max": 0.78, "top-4": 0.45, "softmax": 0.18}
TOLERANCE = 0.03

# Readings of the text. The project holds itself to the first of each; the others are reported.
GRADIENTS = ("score", "loss")
QUERIES = ("training", "held_out")
SWEEPS = ("evaluated", "retrained")
QUERIES_TITLES = {"training": "training queries", "held_out": "held-out queries"}
SWEEP_TITLES = {"evaluated": "trained at M = 64", "retrained": "trained at each M"}
PLACES = {"others": "all but the positive", "all": "all documents"}
CHECKS = {
    "gini": "Gini .78 / .45 / .18, within .03",
    "order": "max above top-4 above softmax at every epoch",
    "crossing": "max ahead of top-4 at M = 32, behind at 64 and above",
    "lowest": "softmax lowest in Recall@1 up to M = 64",
}


def seeds_of(cells: dict, pooling: str, tokens: int = PANEL_TOKENS, dimension: int = SWEEP_DIMENSION) -> list[dict]:
    """The cells of one training, by seed."""
    wanted = {"pooling": pooling, "tokens": tokens, "dimension": dimension}
    found = [cell for cell in cells.values() if wanted.items() <= cell["cell"].items()]
    return sorted(found, key=lambda cell: cell["cell"]["seed"])


def recalls(cells: dict, pooling: str, tokens: int, queries: str, sweep: str) -> list[float]:
    """Recall@1 of each seed on documents of M tokens, trained at that M (``retrained``) or at 64 (``evaluated``)."""
    trained_at = tokens if sweep == "retrained" else PANEL_TOKENS
    return [cell["recall"][queries][str(tokens)] for cell in seeds_of(cells, pooling, trained_at)]


def ginis(cells: dict, pooling: str, gradient: str) -> list[list[float]]:
    """Of each seed, by epoch."""
    return [cell["gini"][gradient] for cell in seeds_of(cells, pooling)]


def injected_recall(cells: dict, pooling: str, dimension: int, queries: str, kind: str, where: str) -> dict[int, float]:
    """Mean Recall@1 over seeds by K, the number of injected tokens; empty if not measured yet."""
    runs = [cell["injection"][queries] for cell in seeds_of(cells, pooling, dimension=dimension)]
    if not runs:
        return {}
    return {0: mean(run["none"] for run in runs)} | {
        k: mean(run[kind][str(k)][where] for run in runs) for k in INJECTED
    }


def kept(recall: dict[int, float]) -> dict[int, float | None]:
    """Of :func:`injected_recall`, the share of that without injected tokens; None if it is 0 or not measured yet."""
    return {k: recall[k] / recall[0] if recall.get(0) else None for k in INJECTED}


def checks(cells: dict) -> list[dict]:
    """Each with ``check``, ``reading``, ``held_to``, ``figures`` and ``pass``. Leaves out what is not measured yet."""
    found = []

    def add(check: str, reading: str, held_to: bool, result: dict) -> None:
        found.append({"check": check, "reading": reading, "held_to": held_to, **result})

    for gradient in GRADIENTS:
        if all(seeds_of(cells, pooling) for pooling in POOLINGS):
            for check, result in (("gini", _levels(cells, gradient)), ("order", _order(cells, gradient))):
                add(check, f"gradient of the {gradient}", gradient == GRADIENTS[0], result)
    for queries, sweep in itertools.product(QUERIES, SWEEPS):
        runs = {
            (pooling, tokens): recalls(cells, pooling, tokens, queries, sweep)
            for pooling in POOLINGS
            for tokens in LENGTHS
        }
        if all(runs.values()):
            means = {pooling: {tokens: mean(runs[pooling, tokens]) for tokens in LENGTHS} for pooling in POOLINGS}
            first = (queries, sweep) == (QUERIES[0], SWEEPS[0])
            for check, result in (("crossing", _crossing(runs)), ("lowest", _lowest(means))):
                add(check, f"{QUERIES_TITLES[queries]}, {SWEEP_TITLES[sweep]}", first, result)
    return found


def _levels(cells: dict, gradient: str) -> dict:
    """Gini coefficients of the last epoch are as published."""
    measured = {pooling: round(mean(run[-1] for run in ginis(cells, pooling, gradient)), 3) for pooling in POOLINGS}
    passed = all(abs(measured[pooling] - PUBLISHED_GINI[pooling]) <= TOLERANCE for pooling in POOLINGS)
    return {"figures": {"measured": measured, "published": PUBLISHED_GINI}, "pass": passed}


def _order(cells: dict, gradient: str) -> dict:
    """Gradients are more concentrated with the maximum than with top-4, and with that than with softmax."""
    runs = [ginis(cells, pooling, gradient) for pooling in POOLINGS]
    smallest = {
        f"{one} - {other}": round(
            min(a - b for pair in zip(above, below, strict=True) for a, b in zip(*pair, strict=True)), 3
        )
        for (one, above), (other, below) in itertools.pairwise(zip(POOLINGS, runs, strict=True))
    }
    return {"figures": {"smallest difference of any epoch and seed": smallest}, "pass": min(smallest.values()) > 0}


def _crossing(runs: dict[tuple[str, int], list[float]]) -> dict:
    """The maximum is ahead of top-4 on the shortest documents and behind on all others, on average over seeds."""
    differences = {
        str(tokens): [one - other for one, other in zip(runs["max", tokens], runs["top-4", tokens], strict=True)]
        for tokens in LENGTHS
    }
    ahead = {tokens: round(mean(values), 3) for tokens, values in differences.items()}
    seeds = {tokens: f"{sum(value > 0 for value in values)} of {len(values)}" for tokens, values in differences.items()}
    shortest, *longer = ahead.values()
    return {"figures": {"max - top-4": ahead, "seeds ahead": seeds}, "pass": shortest > 0 and max(longer) < 0}


def _lowest(means: dict[str, dict[int, float]]) -> dict:
    """Softmax has the lowest Recall@1 on documents of up to 64 tokens."""
    figures = {
        str(tokens): {pooling: round(means[pooling][tokens], 3) for pooling in POOLINGS}
        for tokens in LENGTHS
        if tokens <= PANEL_TOKENS
    }
    passed = all(row["softmax"] < min(row["max"], row["top-4"]) for row in figures.values())
    return {"figures": figures, "pass": passed}


def not_reproduced(cells: dict) -> list[dict]:
    """Published figures to which the project does not hold itself, with what was measured in their place."""
    found = []
    if all(seeds_of(cells, pooling) for pooling in POOLINGS):
        for queries in QUERIES:
            measured = {
                pooling: mean(recalls(cells, pooling, PANEL_TOKENS, queries, "evaluated")) for pooling in POOLINGS
            }
            found.append(_beside("Recall@1 of .33 to .38", f"{QUERIES_TITLES[queries]}, M = {PANEL_TOKENS}", measured))
        for kind in ("random tokens", "random embeddings"):
            measured = {}
            for pooling in POOLINGS:
                recall = injected_recall(cells, pooling, SWEEP_DIMENSION, QUERIES[0], kind, "others")
                measured[pooling] = kept(recall)[INJECTED[-1]]
            reading = f"{kind}, K = {INJECTED[-1]}"
            found.append(_beside("97% of Recall@1 kept under Gaussian injection at d = 16", reading, measured))
    return found


def _beside(published: str, reading: str, measured: dict[str, float | None]) -> dict:
    rounded = {pooling: None if value is None else round(value, 3) for pooling, value in measured.items()}
    return {"published": published, "reading": reading, "measured": rounded}


def checks_table(content: dict) -> str:
    """Each check in each reading; those in bold are held to."""
    rows = []
    for name, title in CHECKS.items():
        for check in (check for check in checks(content["cells"]) if check["check"] == name):
            reading = f"**{check['reading']}**" if check["held_to"] else check["reading"]
            rows.append([title, reading, "yes" if check["pass"] else "no", _figures(name, check["figures"])])
            title = ""
    return table(["published", "reading", "reproduced", "measured"], rows)


def _figures(check: str, figures: dict) -> str:
    if check == "gini":
        return _by_pooling(figures["measured"])
    if check == "lowest":
        return "; ".join(f"M = {tokens}: {_by_pooling(means)}" for tokens, means in figures.items())
    if check == "crossing":
        ahead, seeds = figures["max - top-4"], figures["seeds ahead"]
        return "; ".join(f"M = {tokens}: {ahead[tokens]:+.3f}, ahead in {seeds[tokens]}" for tokens in ahead)
    [(title, values)] = figures.items()
    return f"{title}: " + ", ".join(f"{value:+.3f} ({key})" for key, value in values.items())


def _by_pooling(values: dict[str, float | None]) -> str:
    return " / ".join("none" if values[pooling] is None else f"{values[pooling]:.3f}" for pooling in POOLINGS)


def not_reproduced_table(content: dict) -> str:
    rows = [
        [each["published"], each["reading"], _by_pooling(each["measured"])] for each in not_reproduced(content["cells"])
    ]
    return table(["published", "reading", "measured: max / top-4 / softmax"], rows)


def gini_table(content: dict) -> str:
    """After the last epoch; in brackets the lowest and highest seed. Below, the seeds of all tables."""
    rows = []
    for pooling in POOLINGS:
        last = [[run[-1] for run in ginis(content["cells"], pooling, gradient)] for gradient in GRADIENTS]
        entries = [f"{mean(runs):.3f} ({min(runs):.3f} to {max(runs):.3f})" if runs else "" for runs in last]
        rows.append([pooling, f"{PUBLISHED_GINI[pooling]:.2f}", *entries])
    seeds = sorted({cell["cell"]["seed"] for cell in content["cells"].values()})
    made = table(["pooling", "published", *(f"gradient of the {gradient}" for gradient in GRADIENTS)], rows)
    return f"{made}\n\nSeeds: {', '.join(map(str, seeds))}."


def recall_table(content: dict) -> str:
    """Recall@1 by document length, in all readings."""
    rows = []
    for queries, sweep, pooling in itertools.product(QUERIES, SWEEPS, POOLINGS):
        runs = [recalls(content["cells"], pooling, tokens, queries, sweep) for tokens in LENGTHS]
        entries = [f"{mean(run):.3f}" if run else "" for run in runs]
        rows.append([QUERIES_TITLES[queries], SWEEP_TITLES[sweep], pooling, *entries])
    return table(["Recall@1 of", "", "pooling", *(f"M = {tokens}" for tokens in LENGTHS)], rows)


def injection_table(content: dict) -> str:
    """Recall@1 of training queries without injected tokens, and the share of it that is left with them."""
    cells, rows, last = content["cells"], [], INJECTED[-1]
    for kind, (where, place), pooling in itertools.product(KINDS, PLACES.items(), POOLINGS):
        found = injected_recall(cells, pooling, INJECTION_DIMENSION, QUERIES[0], kind, where)
        shares = ["" if share is None else f"{share:.0%}" for share in kept(found).values()]
        runs = [cell["injection"][QUERIES[0]][kind] for cell in seeds_of(cells, pooling, dimension=INJECTION_DIMENSION)]
        hijacked = f"{mean(run[str(last)]['hijacked'] for run in runs):.0%}" if runs else ""
        rows.append([kind, place, pooling, f"{found[0]:.3f}" if found else "", *shares, hijacked])
    columns = [f"K = {k}" for k in (0, *INJECTED)]
    return table(["injected", "into", "pooling", *columns, f"hijacked at K = {last}"], rows)


def tables(content: dict) -> dict[str, str]:
    """By the name that marks their place in docs/losses.md#a-study-of-pooling."""
    return {
        "pooling-checks-table": checks_table(content),
        "pooling-gini-table": gini_table(content),
        "pooling-recall-table": recall_table(content),
        "pooling-injection-table": injection_table(content),
        "pooling-not-reproduced-table": not_reproduced_table(content),
    }
