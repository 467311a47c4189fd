"""Scoring of compressed documents: this package, both peers, and decompress + einsum, on one GPU.

    python -m benchmarks compressed_operators
    python -m benchmarks compressed_operators --only '*/fast/*' '*/naive/*' --results /tmp/tiny.json   # tiny, on a CPU

A cell is one way to score one format at one shape: time, memory and errors of the forward, and of this package also the
forward with the gradient of the queries. Each competitor has a process of its own. The peers' lists of tiles are cut to
three a kernel, so that the run ends, and those left are recorded.

This package rounds queries inside of the timed calls; queries of the peers are rounded before them. `stored_bytes` are
the documents as the competitor takes them, padding included, of residuals without the codec. Errors are the largest of a
few scores, relative to the largest of these, in float64: `definition` of the numbers that are stored, `uncompressed` of
the bfloat16 vectors. late-interaction-kernels 0.4.5 has no int8; flash-maxsim 0.3.0 has int8 only, of one query a call.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from operator import itemgetter

import torch

from benchmarks.harness.tables import machine, table, times
from benchmarks.operators.compressed_cases import SHAPES, TINY, Shape, forms, measure  # noqa: F401

COMPETITORS = {
    "fast": "this package",
    "naive": "decompress, then einsum",
    "lik": "late-interaction-kernels",
    "flash": "flash-maxsim",
}
# Each format of this package, and the first words of what others call theirs.
FORMATS = {
    "int8 by document": "int8",
    "int8 by token": "int8",
    "fp8": "fp8",
    "residual 4 bits": "residual 4 bits",
    "residual 2 bits": "residual 2 bits",
}
TIMEOUT = 600
PROCESS_OF = ("competitor",)


def cells(options: argparse.Namespace) -> dict[str, dict]:
    """Tiny shapes where there is no GPU."""
    return {
        f"{shape.name}/{competitor}/{form}": {"shape": asdict(shape), "competitor": competitor, "form": form}
        for shape in (SHAPES if torch.cuda.is_available() else TINY)
        for competitor in COMPETITORS
        for form in forms(competitor)
    }


def milliseconds(cells: dict, shape: str, competitor: str, form: str) -> float | None:
    return cells.get(f"{shape}/{competitor}/{form}", {}).get("forward", {}).get("ms")


def fastest(cells: dict, shape: str, competitors: tuple[str, ...], form: str) -> tuple[str, float] | None:
    """The fastest way of some competitors to score a format of this package, and its milliseconds."""
    ways = [(each, name) for each in competitors for name in forms(each) if name.startswith(FORMATS[form])]
    found = [(each, ms) for each, name in ways if (ms := milliseconds(cells, shape, each, name))]
    return min(found, key=itemgetter(1), default=None)


def _times(other: float | None, ours: float) -> str:
    return times(other, ours, ".2f" if other and other / ours < 10 else ",.0f")


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:,.3g} ms" if value < 1000 else f"{value:,.0f} ms"


def markdown(content: dict) -> str:
    """Each format of this package beside its own bfloat16, the fastest peer and the naive way."""
    cells, lines = content["cells"], []
    for shape in dict.fromkeys(name.partition("/")[0] for name in cells):
        base = milliseconds(cells, shape, "fast", "bf16")
        title = shape.replace(".", " against ")
        for form in ("bf16", *FORMATS):
            ms = milliseconds(cells, shape, "fast", form)
            if ms is None:
                continue
            line = [title, form, _ms(ms), _times(base, ms)]
            if form == "bf16":
                lines.append([*line, *[""] * 4])
                continue
            peer, naive = fastest(cells, shape, ("lik", "flash"), form), milliseconds(cells, shape, "naive", form)
            if peer:
                line += [f"{_ms(peer[1])} ({COMPETITORS[peer[0]]})", _times(peer[1], ms)]
            else:
                line += ["", ""]
            lines.append([*line, _ms(naive), _times(naive, ms)])
    made = next(iter(cells.values()))["environment"]
    ways = ["fastest peer", "speed", COMPETITORS["naive"], "speed"]
    made = machine(made, "triton", "late-interaction-kernels", "flash-maxsim")
    return f"{made}.\n\n" + table(["shape", "documents", COMPETITORS["fast"], "times bf16", *ways], lines)
