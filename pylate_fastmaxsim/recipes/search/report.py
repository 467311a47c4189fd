"""The result of a search as a table for the terminal."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from pylate_fastmaxsim.recipes.search.run import ENCODE_DOCUMENTS, ENCODE_QUERIES, INDEX, SEARCH

TITLES = {"ndcg@10": "nDCG@10", "mrr@10": "MRR@10", "recall@100": "Recall@100", "recall@1000": "Recall@1000"}


def search_table(result: dict[str, Any]) -> Table:
    """What was searched, the seconds of each task and the rate of it, and metrics."""
    table = Table(title=f"{result['model']}: searched", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("model", result["kind"])
    table.add_row("documents", f"{result['documents']:,}")
    table.add_row("queries", f"{result['queries']:,}")
    for task, count, unit in (
        (ENCODE_QUERIES, result["queries"], "queries"),
        (ENCODE_DOCUMENTS, result["encoded_documents"], "documents"),
        (INDEX, None, ""),
        (SEARCH, result["queries"], "queries"),
    ):
        if (seconds := result["seconds"].get(task)) is not None:
            rate = f", {count / seconds:,.0f} {unit}/s" if count else ""
            table.add_row(task, f"{seconds:.1f} s{rate}")
    for name, value in (result["metrics"] or {}).items():
        table.add_row(TITLES[name], f"{value:.4f}")
    for name in ("index", "run"):
        if result[name] is not None:
            table.add_row(name, result[name])
    return table
