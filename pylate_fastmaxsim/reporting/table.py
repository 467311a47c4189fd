"""A table for the terminal: drawn in a console of rich, and in aligned columns where there is none."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, Group

Rows = Sequence[tuple[str, ...]]
_UNLIMITED = 100_000


def console() -> Console:
    """The console for tables on stdout; off a terminal nothing is wrapped or cut. Needs rich."""
    from rich.console import Console

    # Brackets and colons in names and paths are neither markup nor emoji.
    return Console(markup=False, emoji=False, width=None if sys.stdout.isatty() else _UNLIMITED)


@dataclass(frozen=True)
class Table:
    """Rows of text under a title, with a caption of sentences below."""

    title: str
    rows: Rows
    caption: str | None = None
    header: bool = True  # the first row is one
    left: int = 1  # how many columns are aligned to the left; the others to the right

    def __str__(self) -> str:
        widths = [max(map(len, column)) for column in zip(*self.rows, strict=True)]
        lines = [self.title]
        for row in self.rows:
            cells = zip(row, widths, strict=True)
            aligned = [
                cell.ljust(width) if place < self.left else cell.rjust(width)
                for place, (cell, width) in enumerate(cells)
            ]
            lines.append("  ".join(aligned).rstrip())
        return "\n".join([*lines, *([self.caption] if self.caption else [])])

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(show_header=self.header)
        head, body = (self.rows[0], self.rows[1:]) if self.header else ([""] * len(self.rows[0]), self.rows)
        for place, name in enumerate(head):
            # Wrapped and never cut off.
            table.add_column(name, justify="left" if place < self.left else "right", overflow="fold")
        for row in body:
            table.add_row(*row)
        # Not its own title and caption, which end at its width.
        caption = [Text(self.caption, "dim italic")] if self.caption else []
        return Group(Text(self.title, "italic"), table, *caption)
