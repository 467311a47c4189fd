"""Markdown table of what compressed documents keep of the exact ranking."""

from __future__ import annotations

from benchmarks.harness.tables import table

# Formats by the names of their cells.
FORMATS = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "int8": "int8, scales of documents",
    "int8-token": "int8, scales of tokens",
    "fp8": "fp8",
    "residual-4": "residual codes, 4 bits",
    "residual-2": "residual codes, 2 bits",
    "residual-1": "residual codes, 1 bit",
}
DATA = {"random": "random vectors", "cranfield": "Cranfield"}
KS = (10, 100)


def markdown(cells: dict[str, dict]) -> str:
    """For each set of documents: bytes of a token, share of the best 10 and 100 that are kept, nDCG@10; also rescored."""
    return "\n\n".join(part for name in DATA if (part := _of_data(name, cells)))


def _of_data(name: str, cells: dict[str, dict]) -> str:
    known = {title: cells[f"{name}/{format}"] for format, title in FORMATS.items() if f"{name}/{format}" in cells}
    if not known:
        return ""
    judged = all("ndcg@10" in cell for cell in known.values())
    header = [DATA[name], "bytes a token"]
    for how in ("", ", rescored"):
        header += [f"best {k} kept{how}" for k in KS] + [f"nDCG@10{how}"] * judged
    rows = []
    for title, cell in known.items():
        entries = []
        for part in (cell, cell["rescored"]):
            entries += [f"{part[f'top{k}']:.1%}" for k in KS]
            entries += [f"{part['ndcg@10']:.4f}"] if judged else []
        rows.append([title, f"{cell['bytes_per_token']:.0f}", *entries])
    return table(header, rows)
