"""Markdown table of the share of hard negatives that first stages find on the Cranfield collection."""

from __future__ import annotations

from benchmarks.harness.tables import table

KS = (10, 30, 100, 300, 1000)
QUERIES = ("questions", "titles")


def markdown(cells: dict[str, dict]) -> str:
    """The share of negatives that are found for each k, of the questions and of the titles."""
    rows = [
        [name, *(f"{cell[queries][str(k)]:.0%}" for queries in QUERIES for k in KS)] for name, cell in cells.items()
    ]
    columns = [f"k = {k:,}" for k in KS]
    return table(["first stage", f"questions, {columns[0]}", *columns[1:], f"titles, {columns[0]}", *columns[1:]], rows)
