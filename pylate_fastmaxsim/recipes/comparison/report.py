"""Tables of a training run and of mining for the terminal."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from pylate_fastmaxsim.comparison.report import METRICS, form


def training_table(result: dict[str, Any]) -> Table:
    """The result of a training run."""
    table = _rows(f"{result['recipe']}: trained")
    losses = result["losses"]
    table.add_row(
        "steps", str(result["steps"]) + (f" (resumed from {result['resumed_from']})" if result["resumed_from"] else "")
    )
    if losses:
        table.add_row("logged loss, first to last", f"{losses[0][1]:.4f} to {losses[-1][1]:.4f}")
    for key, title in METRICS.items():
        if key in result:
            table.add_row(title, form("{:.4f}", result[key]))
    table.add_row("pylate-fastmaxsim", "on" if result["fast"]["enabled"] else f"off ({result['fast']['why_off']})")
    table.add_row("model", result["model"])
    return table


def _rows(title: str) -> Table:
    """A table of names and values, which are wrapped and never cut off."""
    table = Table(title=title, title_justify="left", show_header=False)
    for _ in range(2):
        table.add_column(overflow="fold")
    return table


def mining_table(result: dict[str, Any]) -> Table:
    """The result of mining."""
    table = _rows("mined")
    for name in ("queries", "documents", "rows"):
        table.add_row(name, f"{result[name]:,}")
    table.add_row("pairs without enough negatives", f"{result['left_out']:,}")
    table.add_row("data", result["data"])
    return table
