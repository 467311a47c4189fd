"""Markdown tables of the study, means over seeds. What is not measured yet is left empty."""

from __future__ import annotations

import itertools
from statistics import mean

from benchmarks.harness.tables import table
from benchmarks.pooling_study.cell import INJECTED, KINDS, LENGTHS, POOLINGS
from benchmarks.pooling_study.checks import (
    GRADIENTS,
    PUBLISHED_GINI,
    QUERIES,
    QUERIES_TITLES,
    SWEEP_TITLES,
    SWEEPS,
    ginis,
    injected_recall,
    kept,
    recalls,
    seeds_of,
)

INJECTION_DIMENSION = 128
PLACES = {"others": "all but the positive", "all": "all documents"}
CHECKS = {
    "gini": "Gini .78 / .45 / .18, within .03",
    "order": "max above top-4 above softmax at every epoch",
    "crossing": "max ahead of top-4 at M = 32, behind at 64 and above",
    "lowest": "softmax lowest in Recall@1 up to M = 64",
}


def checks_table(content: dict) -> str:
    """Each check in each reading; those in bold are held to."""
    rows = []
    for name, title in CHECKS.items():
        for check in (check for check in content["checks"] if check["check"] == name):
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
    rows = [[each["published"], each["reading"], _by_pooling(each["measured"])] for each in content["not_reproduced"]]
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
    """By the name that marks their place in docs/pooling_study.md."""
    return {
        "pooling-checks-table": checks_table(content),
        "pooling-gini-table": gini_table(content),
        "pooling-recall-table": recall_table(content),
        "pooling-injection-table": injection_table(content),
        "pooling-not-reproduced-table": not_reproduced_table(content),
    }
