"""The result of an evaluation as tables for the terminal."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from pylate_fastmaxsim.recipes.search.report import TITLES
from pylate_fastmaxsim.recipes.search.run import ENCODE_DOCUMENTS, SEARCH

NAMES_OF_TESTS = {"student": "Student's paired t-test", "fisher": "Fisher's randomisation test"}


def metrics_table(result: dict[str, Any]) -> Table:
    """Metrics and times of each model."""
    title = f"{result['collection']}: {result['documents']:,} documents, {result['queries']:,} queries"
    table = Table(title=title, title_justify="left")
    table.add_column("model")
    for name in (*TITLES.values(), "encode", "search"):
        table.add_column(name, justify="right")
    for model in result["models"]:
        encoding = model["seconds"].get(ENCODE_DOCUMENTS)
        table.add_row(
            model["label"],
            *(f"{model['metrics'][name]:.4f}" for name in TITLES),
            "kept" if encoding is None else f"{encoding:.1f} s",
            f"{model['seconds'][SEARCH]:.1f} s",
        )
    return table


def pairs_table(result: dict[str, Any]) -> Table:
    """The difference of each two models by each metric, its p, and the queries for which it is positive or negative."""
    pairs = [row["models"] for row in result["pairs"] if row["metric"] == next(iter(TITLES))]
    corrected = f", p corrected for {len(pairs)} pairs (Holm)" if len(pairs) > 1 else ""
    title = f"{NAMES_OF_TESTS[result['test']]} over {result['queries']:,} queries{corrected}"
    table = Table(title=title, title_justify="left")
    table.add_column("models")
    table.add_column("metric")
    for name in ("difference", "p", "better", "equal", "worse"):
        table.add_column(name, justify="right")
    before = None
    for row in sorted(result["pairs"], key=lambda row: pairs.index(row["models"])):
        first, second = row["models"]
        p = f"{row['corrected_p']:.3f}" if row["corrected_p"] >= 0.001 else "< 0.001"
        counts = (str(row[name]) for name in ("better", "equal", "worse"))
        names = f"{second} against {first}" if row["models"] != before else ""
        table.add_row(names, TITLES[row["metric"]], f"{row['difference']:+.4f}", p, *counts)
        before = row["models"]
    return table
