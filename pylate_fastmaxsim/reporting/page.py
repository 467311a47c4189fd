"""A report as one self-contained HTML file."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pylate_fastmaxsim.files.replace import replace_file
from pylate_fastmaxsim.reporting.figures import svg
from pylate_fastmaxsim.reporting.numbers import GIBIBYTE
from pylate_fastmaxsim.reporting.table import Rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEMPLATE = "page.html.jinja"


@dataclass(frozen=True)
class Section:
    """A section of a page: a note, a figure of ``size`` in inches that ``draw`` fills, and a table with a header."""

    title: str
    note: str = ""
    rows: Rows = ()
    draw: Callable[[Figure], None] | None = None
    size: tuple[float, float] = (8.5, 3.5)

    def image(self) -> str:
        """The SVG of the figure in base64."""
        return base64.b64encode(svg(self.draw, *self.size).encode()).decode()


def write_page(
    file: Path,
    *,
    title: str,
    name: str,
    headline: str,
    sections: Sequence[Section],
    environment: dict[str, Any],
    settings: tuple[str, dict[str, Any]],
    warnings: Sequence[str] = (),
) -> None:
    """Write a page: a headline, warnings, sections, machine and versions, and settings as YAML under a title."""
    import yaml
    from jinja2 import Environment

    text = files(__package__).joinpath(TEMPLATE).read_text(encoding="utf-8")
    memory = environment.get("device_memory")
    shown = {} if memory is None else {"device_memory": f"{memory / GIBIBYTE:.1f} GiB"}
    settings_title, values = settings
    html = (
        Environment(autoescape=True)
        .from_string(text)
        .render(
            title=title,
            name=name,
            headline=headline,
            warnings=warnings,
            sections=sections,
            environment={key.replace("_", " "): value for key, value in (environment | shown).items()},
            settings_title=settings_title,
            settings=yaml.safe_dump(values, sort_keys=False, allow_unicode=True),
        )
    )
    replace_file(file, html.encode())
