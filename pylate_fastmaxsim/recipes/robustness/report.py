"""The result as tables for the terminal and the page."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from pylate_fastmaxsim.diagnostics.injection import EVERYWHERE, RANDOM, TARGETED

ATTACKS = {
    TARGETED: "near query tokens",
    RANDOM: "random unit vectors",
    EVERYWHERE: "near query tokens, in gold documents too",
}

Rows = list[tuple[str, ...]]


def length_rows(result: dict[str, Any]) -> Rows:
    """nDCG@10 and Recall@1 of each length and pooling; the first row is the header."""
    rows: Rows = [("times as long", "tokens", *result["poolings"])]
    for times in _values(result["lengths"], "times"):
        some = [row for row in result["lengths"] if row["times"] == times]
        rows.append((str(times), f"{some[0]['tokens']:.0f}", *map(_metrics, some)))
    return rows


def injection_rows(result: dict[str, Any], attack: str) -> Rows:
    """nDCG@10 and Recall@1 of each number of injected tokens and pooling, and the hijack rate."""
    rows: Rows = [("tokens", "hijack rate", *result["poolings"])]
    for some in _by_count(result, attack):
        rows.append((str(some[0]["tokens"]), f"{some[0]['hijack_rate']:.3f}", *map(_metrics, some)))
    return rows


def weight_rows(result: dict[str, Any], attack: str) -> Rows:
    """The share of the weight of each pooling on injected tokens."""
    rows: Rows = [("tokens", *result["poolings"])]
    for some in _by_count(result, attack):
        rows.append((str(some[0]["tokens"]), *(f"{row['injected_weight']:.3f}" for row in some)))
    return rows


def tables(result: dict[str, Any]) -> list[Table]:
    """One table for the lengths, and one for each attack."""
    shown = [_table(f"{title_of(result)}: nDCG@10 / Recall@1 against document length", length_rows(result), result)]
    for attack, title in attacks_of(result).items():
        shown.append(_table(f"with injected tokens: {title}", injection_rows(result, attack)))
    return shown


def attacks_of(result: dict[str, Any]) -> dict[str, str]:
    """The titles of the attacks that were measured: none of a model without token embeddings."""
    return ATTACKS if result["injection"] else {}


def title_of(result: dict[str, Any]) -> str:
    """The name of what was measured."""
    return result["recipe"] or result["model"]


def caption(result: dict[str, Any]) -> str:
    """What was measured on, how documents were made longer, and whether they were cut."""
    how = {
        "text": "Words of other documents are appended and read with the document",
        "tokens": "Token embeddings of other documents are appended",
    }[result["appended"]]
    limit, longest = result["lengthened_document_length"], max(row["times"] for row in result["lengths"])
    lifted = (
        "" if limit is None or longest == 1 else f", up to {limit:,} tokens in place of {result['document_length']:,}"
    )
    cut = max((row["cut"] for row in result["lengths"]), default=0)
    were_cut = f" {cut:,} of the longest documents were cut there." if cut else ""
    attacked = "" if result["injection"] else f" Nothing is injected: a {result['kind']} model has no token embeddings."
    return (
        f"{result['queries']:,} queries, {result['documents']:,} documents of {result['data']}. {how}{lifted}.{were_cut}"
        f"{attacked} It took {result['seconds']:.0f} s."
    )


def _table(title: str, rows: Rows, result: dict[str, Any] | None = None) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left")
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows[1:]:
        table.add_row(*row)
    if result is not None:
        table.caption = caption(result)
    return table


def _metrics(row: dict[str, Any]) -> str:
    return f"{row['ndcg@10']:.3f} / {row['recall@1']:.3f}"


def _by_count(result: dict[str, Any], attack: str) -> list[list[dict[str, Any]]]:
    rows = [row for row in result["injection"] if row["attack"] == attack]
    return [[row for row in rows if row["tokens"] == count] for count in _values(rows, "tokens")]


def _values(rows: list[dict[str, Any]], key: str) -> list[int]:
    return list(dict.fromkeys(row[key] for row in rows))
