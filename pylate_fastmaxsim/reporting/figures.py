"""Figures of matplotlib in files, and in pages as SVG."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pylate_fastmaxsim.files.replace import replace_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def svg(draw: Callable[[Figure], None], width: float, height: float) -> str:
    """The SVG of a figure of ``width`` x ``height`` inches that ``draw`` fills."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    draw(figure)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None}, transparent=True)
    return text.getvalue()


def write_png(
    file: Path, draw: Callable[[Figure], None], title: str, width: float, height: float, dpi: int = 150
) -> None:
    """Write a figure that ``draw`` fills, with a title in its upper left corner."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    draw(figure)
    # Dollar signs in a name are not a formula.
    figure.suptitle(title, fontsize=12, x=0.01, ha="left", parse_math=False)
    replace_file(file, lambda scratch: figure.savefig(scratch, dpi=dpi))


def hide_frame(axes: Axes, *more: str) -> None:
    """Hide the upper and the right edge of a plot, and the edges that ``more`` names."""
    axes.spines[["top", "right", *more]].set_visible(False)
