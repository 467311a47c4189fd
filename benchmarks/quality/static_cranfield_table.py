"""Markdown tables of static late interaction on the Cranfield collection."""

from __future__ import annotations

from benchmarks.harness.tables import table

FLOOR = 0.2
THRESHOLDS = (FLOOR, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
BM25_THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
# Of query tokens, as StaticLateInteraction takes them.
QUERY_WEIGHTS: dict[str, str | None] = {"none": None, "norms": "norms", "IDF": "idf"}
BM25_CELL, ENCODER_CELL, MAXSIM_CELL = "BM25", "encoder", "MaxSim"


def cell_name(threshold: float, weights: str | None = None) -> str:
    return "/".join(filter(None, (f"threshold={threshold}", weights)))


def ndcg(cell: dict, weights: str) -> str:
    return f"{cell['metrics'][weights]['ndcg@10']:.4f}" if weights in cell["metrics"] else ""


def markdown(cells: dict[str, dict]) -> str:
    """Quality, non-zeros and times by threshold, of bounds of MaxSim and with BM25's weights; and what stands beside them."""
    rows = [_row("none is cut: MaxSim", cells[MAXSIM_CELL])] if MAXSIM_CELL in cells else []
    rows += [_row(f"{each:g}", cells[cell_name(each)]) for each in THRESHOLDS if cell_name(each) in cells]
    columns = ["threshold", "entries a document", *(f"nDCG@10, weights: {name}" for name in QUERY_WEIGHTS)]
    parts = [table([*columns, "a document", "a query", "a query, certified top-10"], rows)]
    named = {f"{each:g}": cell_name(each, "BM25") for each in BM25_THRESHOLDS} | {"BM25": BM25_CELL}
    rows = [_row(title, cells[name], ["IDF"])[:-1] for title, name in named.items() if name in cells]
    parts.append("With IDF of query tokens and BM25's saturation of document tokens:")
    parts.append(table(["threshold", "entries a document", "nDCG@10", "a document", "a query"], rows))
    if ENCODER_CELL in cells:
        cell = cells[ENCODER_CELL]
        parts.append(
            f"The encoder's own late interaction, from its outputs for whole texts: nDCG@10 {ndcg(cell, 'none')}, "
            f"{_ms(cell['documents_ms'])} a document, {_ms(cell['search_ms'])} a query."
        )
    seconds = [f"{cell['table_seconds']:.0f} s" for cell in cells.values() if "table_seconds" in cell]
    if seconds:
        machine = next(iter(cells.values()))["environment"]["host"]
        parts.append(f"On {machine}; the neighbours of all tokens are made once, in {seconds[0]}.")
    return "\n\n".join(parts)


def _row(title: str, cell: dict, weights: list[str] | None = None) -> list[str]:
    times = [_ms(cell[key]) if key in cell else "" for key in ("documents_ms", "search_ms", "exact_ms")]
    return [title, f"{cell['nonzeros']:,.0f}", *(ndcg(cell, name) for name in weights or QUERY_WEIGHTS), *times]


def _ms(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"
