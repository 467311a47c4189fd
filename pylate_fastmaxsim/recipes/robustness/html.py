"""The result as one self-contained HTML file, with heat maps of a few pairs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pylate_fastmaxsim.comparison.html import section, write_page
from pylate_fastmaxsim.diagnostics.injection import TARGETED
from pylate_fastmaxsim.recipes.robustness import figures
from pylate_fastmaxsim.recipes.robustness.measure import Pair
from pylate_fastmaxsim.recipes.robustness.report import (
    attacks_of,
    caption,
    injection_rows,
    length_rows,
    title_of,
    weight_rows,
)

SETTINGS = ("data", "appended", "document_length", "lengthened_document_length", "noise", "seed", "poolings")
SHOWN = 300  # letters of a text


def write_html(result: dict[str, Any], pairs: Sequence[Pair], file: Path) -> None:
    """Write the report of the content of ``robustness.json`` and a few pairs."""
    name = title_of(result)
    write_page(
        file,
        title=f"{name}: robustness",
        name=name,
        headline=f"How retrieval holds up with longer and with attacked documents, by {len(result['poolings'])} poolings",
        warnings=[],
        sections=[*_sections(result), *map(_pair_section, pairs)],
        environment=result["environment"],
        settings=("Settings", {key: result[key] for key in SETTINGS}),
    )


def _sections(result: dict[str, Any]) -> list[dict[str, Any]]:
    attacked = (
        "Documents that are not gold for a query carry that many tokens more in its ranking. nDCG@10 / Recall@1. The hijack "
        "rate is the share of query tokens, over all pairs with such documents, whose most similar token is injected."
    )
    return [
        section("Overview", caption(result), [], figures.overview(result), (12, 5.5)),
        section("Longer documents", "nDCG@10 / Recall@1.", length_rows(result)),
        *(
            section(f"Injected tokens: {title}", attacked, injection_rows(result, attack))
            for attack, title in attacks_of(result).items()
        ),
        *([_hijacked(result)] if result["injection"] else []),
    ]


def _hijacked(result: dict[str, Any]) -> dict[str, Any]:
    return section(
        "What is hijacked",
        "The share of each pooling's weight that is on injected tokens; the table is of tokens near query tokens.",
        weight_rows(result, TARGETED),
        figures.hijacking(result),
        (9, 3.4),
    )


def _pair_section(pair: Pair) -> dict[str, Any]:
    query, document = (text if len(text) <= SHOWN else f"{text[:SHOWN]}..." for text in (pair.query, pair.document))
    note = f"The best document that is not gold, before and after {pair.injected} injected tokens: {document}"
    return section(f"Query: {query}", note, [], figures.heat_maps(pair), (11, 4.5))
