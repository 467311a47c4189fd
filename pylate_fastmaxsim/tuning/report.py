"""What a search found: a row to paste into the tables of kernels/launch.py, and a table of what was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from rich.table import Table

from pylate_fastmaxsim.tuning.search import Measured, Search


def row_text(table: str, architecture: int, arithmetic: str, dim: int, found: Search) -> str:
    """Python text: a comment that says where the row belongs, and the row.

    `table` is the name of a table, `architecture` that of its rows which this GPU takes.

    Examples
    --------
    >>> from pylate_fastmaxsim.kernels.maxsim import tiles
    >>> from pylate_fastmaxsim.tuning.search import Measured, Search
    >>> own = Measured(tiles.QueryGradientTiles(4, 128, 8, 2), (1.0,))
    >>> print(row_text("_QUERY_GRADIENT", 90, "half", 128, Search(own, own, [own], True)))
    # _QUERY_GRADIENT[90, "half"]: the table's own row, nothing was clearly faster
    (128, QueryGradientTiles(block_rows=4, block_d=128, unroll=8, num_warps=2)),
    """
    if found.best is found.table:
        verdict = "the table's own row, nothing was clearly faster"
    else:
        verdict = f"{1 / found.best.relative_to(found.table):.2f} times as fast as the table's row"
    return f'# {table}[{architecture}, "{arithmetic}"]: {verdict}\n({dim}, {found.best.tiles}),'


def measured_table(family: str, found: Search, shapes: Sequence[object]) -> Table:
    """Every configuration that was tried, the fastest first, by what it changes in the table's row."""
    title = f"{family}, milliseconds" + ("" if found.finished else " (stopped by the budget)")
    table = Table(title=title, title_justify="left")
    table.add_column("changed")
    for shape in shapes:
        table.add_column(str(shape), justify="right")
    table.add_column("time", justify="right")
    for one in sorted(found.measured, key=lambda one: one.relative_to(found.table)):
        relative = one.relative_to(found.table)
        table.add_row(
            _changed(one.tiles, found.table.tiles),
            *([f"{milliseconds:.4f}" for milliseconds in one.milliseconds] or [""] * len(shapes)),
            one.problem if math.isinf(relative) else f"{relative:.1%}",
            style=_style(one, found),
        )
    table.caption = "time: relative to the table's row, geometric mean over the shapes"
    table.caption_justify = "left"
    return table


def _style(one: Measured, found: Search) -> str | None:
    if one.problem is not None:
        return "red"
    return "bold" if one is found.best else None


def _changed(tiles: NamedTuple, own: NamedTuple) -> str:
    values = tiles._asdict()
    changed = [f"{name}={value}" for name, value in values.items() if value != getattr(own, name)]
    return ", ".join(changed) or "the table's row"
