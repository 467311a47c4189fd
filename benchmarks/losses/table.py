"""Markdown tables of the losses benchmark."""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter

from benchmarks.harness.tables import table
from benchmarks.losses.ceiling import ceiling
from benchmarks.training.train_step import PATHS, mark_of_runs, row_title

LOSS_TITLES = {
    "contrastive": "Contrastive",
    "cached_contrastive": "CachedContrastive",
    "distillation": "Distillation",
}


def of_kind(content: dict, kind: str) -> list[dict]:
    return [cell for cell in content["cells"].values() if cell["cell"]["kind"] == kind]


def _amount(result: dict) -> str:
    if "failure" in result:
        return result["failure"].split(":")[0]
    peak = result["peak_bytes"]
    return f"{result['ms']:.2f} ms" + ("" if peak is None else f", {peak / 2**20:,.0f} MiB")


def embedded_table(content: dict) -> str:
    """Forward + backward of each loss, with ratios to stock and to the better peer; ‡ compares two runs."""
    cells = of_kind(content, "embedded")
    if not cells:
        return ""
    shapes = list(dict.fromkeys(_shape(cell["cell"]) for cell in cells))
    by_shape = {(_shape(cell["cell"]), cell["cell"]["path"]): cell for cell in cells}
    lines = []
    for shape in shapes:
        row = {path: by_shape[shape, path] for path in PATHS if (shape, path) in by_shape}
        timed = {path: cell for path, cell in row.items() if "ms" in cell}
        entries = [_amount(row[path]) if path in row else "" for path in PATHS]
        peers = [timed[path] for path in ("lik", "flash") if path in timed]
        fast = timed.get("fast")
        for other in (timed.get("stock"), min(peers, key=itemgetter("ms"), default=None)):
            entries.append(f"{other['ms'] / fast['ms']:.1f}x{mark_of_runs(fast, other)}" if other and fast else "")
        lines.append([shape, *entries])
    return table(["loss", *PATHS.values(), "against PyLate", "against the better peer"], lines)


def _shape(cell: dict) -> str:
    return (
        f"{LOSS_TITLES[cell['loss']]}, {cell['queries']} queries, {cell['columns']} documents each, "
        f"up to {cell['document_length']} tokens"
    )


def ceiling_table(content: dict) -> str:
    """The largest batch that fits, its peak memory, and what stopped the next size."""
    groups: dict[tuple, dict[int, dict]] = {}
    for cell in of_kind(content, "ceiling"):
        key = cell["cell"]
        group = (key["loss"], key["layers"], key["path"], key["compile"], key.get("chunks"))
        groups.setdefault(group, {})[key["batch"]] = cell
    if not groups:
        return ""
    lines = []
    losses, paths = list(LOSS_TITLES), list(PATHS)

    # All layers first.
    def order(group: tuple) -> tuple:
        loss, layers, path, *options = group
        return losses.index(loss), layers or 0, paths.index(path), *map(bool, options)

    for group in sorted(groups, key=order):
        loss, layers, path, compiled, chunks = group
        tried = groups[group]
        largest, stopped = ceiling(tried)
        peak = "" if largest is None or tried[largest]["peak_gib"] is None else f"{tried[largest]['peak_gib']:.1f} GiB"
        reason = "not tried" if stopped is None else f"{stopped['cell']['batch']}: {stopped['status']}"
        title = LOSS_TITLES[loss] + ("" if layers is None else f", {layers} layers")
        title += "" if chunks is None else ", by memory"
        lines.append([title, row_title(path, compiled), str(largest or "none"), peak, reason])
    return table(["loss", "path", "largest batch", "peak memory", "next size tried"], lines)


TABLES = {
    "embedded": (
        "One loss, from token embeddings to their gradients, and its peak memory beyond them:",
        embedded_table,
    ),
    "ceiling": ("The largest batch of which a step fits:", ceiling_table),
}


def markdown(content: dict, kinds: Iterable[str] = TABLES) -> str:
    """The tables of what has been measured, each under its title."""
    made = {title: make(content) for title, make in map(TABLES.get, kinds)}
    return "\n\n".join(f"{title}\n\n{text}" for title, text in made.items() if text)
