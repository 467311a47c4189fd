"""The result of a search as a table for the terminal."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from pylate_fastmaxsim.recipes.search.run import (
    ENCODE_DOCUMENTS,
    ENCODE_QUERIES,
    ENCODE_SAMPLE,
    INDEX,
    PRUNED,
    SEARCH,
)

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
        (ENCODE_SAMPLE, None, ""),
        (ENCODE_DOCUMENTS, result["encoded_documents"], "documents"),
        (INDEX, None, ""),
        (SEARCH, result["queries"], "queries"),
        (PRUNED, result["queries"], "queries"),
    ):
        if (seconds := result["seconds"].get(task)) is not None:
            rate = f", {count / seconds:,.0f} {unit}/s" if count else ""
            table.add_row(task, f"{seconds:.1f} s{rate}")
    for name, value in (result["metrics"] or {}).items():
        table.add_row(TITLES[name], f"{value:.4f}")
    _add_plaid(table, result["plaid"] or {})
    for name in ("index", "run"):
        if result[name] is not None:
            table.add_row(name, result[name])
    return table


def _add_plaid(table: Table, plaid: dict[str, Any]) -> None:
    """What PLAID's own search finds of the exhaustive ranking of its index."""
    if "not_searched" in plaid:
        table.add_row(PRUNED, f"not measured: {plaid['not_searched']}")
    shares = [
        f"{value:.1%} of the top {name.removeprefix('overlap@')}"
        for name, value in plaid.items()
        if name.startswith("overlap@")
    ]
    if shares:
        table.add_row(f"{PRUNED} finds", ", ".join(shares))
    for name, value in (plaid.get("metrics") or {}).items():
        table.add_row(f"{TITLES[name]} of {PRUNED}", f"{value:.4f}")
