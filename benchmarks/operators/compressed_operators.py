"""Scoring of compressed documents: this package, both peers, and decompress + einsum, on one GPU.

    python -m benchmarks compressed_operators
    python -m benchmarks compressed_operators --render
    python -m benchmarks compressed_operators --only '*/fast/*' '*/naive/*' --results /tmp/tiny.json   # tiny, on a CPU

A cell is one way to score one format at one shape: time, memory and errors of the forward, and of this package also the
forward with the gradient of the queries. Each competitor has a process of its own. The kernels of this package are
compiled before the first cell, in several processes; the peers' lists of tiles are cut to three a kernel, so that the run
ends, and those left are recorded. What may take minutes comes last.

This package rounds queries inside of the timed calls; queries of the peers are rounded before them. `stored_bytes` are
the documents as the competitor takes them, padding included, of residuals without the codec. Errors are the largest of a
few scores, relative to the largest of these, in float64: `definition` of the numbers that are stored, `uncompressed` of
the bfloat16 vectors. late-interaction-kernels 0.4.5 has no int8; flash-maxsim 0.3.0 has int8 only, of one query a call.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path

import torch

from benchmarks.harness.tables import table
from benchmarks.harness.workers import failure
from benchmarks.operators.compressed_cases import SHAPES, TINY, Shape, answer, forms
from pylate_fastmaxsim import BatchShape
from pylate_fastmaxsim.precompile.processes import compile_calls
from pylate_fastmaxsim.precompile.shapes import calls_of

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
PACKED = "32x32.100000x80.packed"
COLOURS = {"fast": "#d62728", "lik": "#1f77b4", "flash": "#2ca02c", "naive": "#555555"}


def cells(options: argparse.Namespace) -> dict[str, dict]:
    """Tiny shapes where there is no GPU."""
    made = {
        f"{shape.name}/{competitor}/{form}": {"shape": asdict(shape), "competitor": competitor, "form": form}
        for shape in (SHAPES if torch.cuda.is_available() else TINY)
        for competitor in COMPETITORS
        for form in forms(competitor, shape)
    }
    return dict(sorted(made.items(), key=lambda each: each[0].startswith(f"{PACKED}/lik/residual")))


process_of = itemgetter("competitor")
measure = answer


def recorded(*_) -> dict:
    return {"compiling": fill_caches(SHAPES)} if torch.cuda.is_available() else {}


def fill_caches(shapes: list[Shape]) -> dict:
    """Compile in several processes: the run then finds everything in Triton's cache on disk.

    What fails here fails again in its cell.
    """
    batches = [
        BatchShape(
            shape.queries,
            shape.query_length,
            shape.documents,
            shape.longest,
            shape.dim,
            masked=("nothing",),
            formats=("int8", "int8-per-token", "fp8", "residual-4", "residual-2"),
        )
        for shape in shapes
    ]
    calls = [call for batch in batches for call in calls_of(batch) if call.gradients in (None, "queries")]
    try:
        return asdict(compile_calls(calls))
    except RuntimeError as error:
        return {"failure": failure(error)}


def milliseconds(cells: dict, shape: str, competitor: str, form: str, measure: str = "forward") -> float | None:
    return cells.get(f"{shape}/{competitor}/{form}", {}).get(measure, {}).get("ms")


def fastest(cells: dict, shape: str, competitors: tuple[str, ...], form: str) -> tuple[str, float] | None:
    """The fastest way of some competitors to score a format of this package, and its milliseconds."""
    found = []
    for key in cells:
        of_shape, competitor, name = key.split("/")
        ms = milliseconds(cells, of_shape, competitor, name)
        if of_shape == shape and competitor in competitors and name.startswith(FORMATS[form]) and ms:
            found.append((competitor, ms))
    return min(found, key=lambda item: item[1], default=None)


def shapes_of(cells: dict) -> list[str]:
    return list(dict.fromkeys(name.partition("/")[0] for name in cells))


def ratios(cells: dict) -> dict[str, float]:
    """How many times faster each way is than this package's bfloat16 forward at the same shape."""
    found = {}
    for key in cells:
        shape, competitor, form = key.split("/")
        base, ms = milliseconds(cells, shape, "fast", "bf16"), milliseconds(cells, shape, competitor, form)
        if base and ms:
            found[key] = base / ms
    return found


def times(cells: dict, shape: str, form: str, competitors: tuple[str, ...] = ()) -> float | None:
    """How many times faster a format is than the fastest of some competitors, or than bfloat16 of this package."""
    ours = milliseconds(cells, shape, "fast", form)
    if competitors:
        other = fastest(cells, shape, competitors, form)
        other = other and other[1]
    else:
        other = milliseconds(cells, shape, "fast", "bf16")
    return other / ours if other and ours else None


def _shape_title(shape: str) -> str:
    return shape.replace(".packed", ", packed").replace(".", " against ")


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x" if value < 10 else f"{value:,.0f}x"


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:,.3g} ms" if value < 1000 else f"{value:,.0f} ms"


def speed_table(cells: dict) -> str:
    """Each format of this package beside its own bfloat16, the fastest peer and the naive way."""
    lines = []
    for shape in shapes_of(cells):
        for form in ("bf16", *FORMATS):
            ms = milliseconds(cells, shape, "fast", form)
            if ms is None:
                continue
            line = [_shape_title(shape), form, _ms(ms), _times(times(cells, shape, form))]
            if form == "bf16":
                line += [""] * 4
            else:
                peer = fastest(cells, shape, ("lik", "flash"), form)
                line += [f"{_ms(peer[1])} ({COMPETITORS[peer[0]]})" if peer else ""]
                line += [_times(times(cells, shape, form, ("lik", "flash")))]
                plain = milliseconds(cells, shape, "naive", form)
                line += [_ms(plain), _times(plain and plain / ms)]
            lines.append(line)
    peer, plain = (["fastest peer", "speed"], [COMPETITORS["naive"], "speed"])
    return table(["shape", "documents", COMPETITORS["fast"], "times bf16", *peer, *plain], lines)


def _error(cell: dict, name: str) -> str:
    errors = cell.get("errors", {})
    return f"{errors[name]:.1e}" if name in errors else errors.get("failure", "")


def _result(cell: dict, measure: str) -> str:
    result = cell.get(measure)
    if result is None:
        return cell.get("failure") or cell.get("skipped", "")
    if "ms" not in result:
        return result["failure"]
    memory = result.get("peak_bytes")
    return _ms(result["ms"]) + ("" if memory is None else f", {memory / 2**20:,.1f} MiB")


def cells_table(cells: dict) -> str:
    """Every cell: time and memory, the gradient of the queries, errors, stored bytes."""
    found, lines = ratios(cells), []
    for key, cell in cells.items():
        shape, competitor, form = key.split("/")
        size = f"{cell['stored_bytes'] / 2**20:,.1f}" if "stored_bytes" in cell else ""
        gradient = _result(cell, "query_gradient") if "query_gradient" in cell else ""
        entries = [_result(cell, "forward"), _times(found.get(key)), gradient]
        kept = [_error(cell, "definition"), _error(cell, "uncompressed")]
        lines.append([_shape_title(shape), COMPETITORS[competitor], form, size, *entries, *kept])
    return table(
        [
            "shape", "", "documents", "MiB stored", "forward", "times bf16", "forward + gradient of queries",
            "error", "error with compression",
        ],
        lines,
    )  # fmt: skip


def docs_table(content: dict) -> str:
    """The table of docs/corpora.md."""
    cells = content["cells"]
    made = next(iter(cells.values()))["environment"]
    versions = [f"{name} {made[name]}" for name in ("torch", "triton", "late-interaction-kernels", "flash-maxsim")]
    return f"{made['device']}, {', '.join(versions)}, {made['date']}.\n\n{speed_table(cells)}"


def markdown(content: dict) -> str:
    """Everything, for the terminal."""
    return "\n\n".join([docs_table(content), cells_table(content["cells"])])


def plot(content: dict, target: Path) -> None:
    """Bars beside the results file, a panel for each shape; the line is bfloat16 of this package."""
    from benchmarks.harness.plots import plt

    cells = content["cells"]
    shapes = shapes_of(cells)
    figure, axes = plt.subplots(1, len(shapes), figsize=(4.5 * len(shapes), 4.5), squeeze=False)
    for axis, shape in zip(axes[0], shapes, strict=True):
        for place, (competitor, colour) in enumerate(COLOURS.items()):
            points = []
            for index, form in enumerate(FORMATS):
                if competitor in ("fast", "naive"):
                    ms = milliseconds(cells, shape, competitor, form)
                else:
                    found = fastest(cells, shape, (competitor,), form)
                    ms = found and found[1]
                if ms:
                    points.append((index + (place - 1.5) * 0.2, ms))
            bars = axis.bar(*zip(*points, strict=True), 0.19, color=colour, label=COMPETITORS[competitor]) if points else []  # fmt: skip
            if points:
                axis.bar_label(bars, fmt="{:.3g}", fontsize=6, padding=1, rotation=90)
        base = milliseconds(cells, shape, "fast", "bf16")
        if base:
            axis.axhline(base, color=COLOURS["fast"], linestyle="--", linewidth=1, label="this package, bf16")
        axis.set_xticks(range(len(FORMATS)), [form.replace(" ", "\n", 1) for form in FORMATS], fontsize=7)
        axis.set(ylabel="time (ms)", title=shape.replace(".packed", ", packed").replace(".", " against "))
        axis.margins(y=0.15)
        if axis.patches:
            axis.set_yscale("log")
        axis.grid(alpha=0.3, axis="y")
    figure.suptitle("MaxSim of compressed documents, forward, d = 128")
    labels = {}
    for axis in axes[0]:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            labels.setdefault(label, handle)
    figure.legend(labels.values(), labels.keys(), loc="lower center", ncols=len(labels), frameon=False)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(target.with_suffix(".png"), dpi=130)
    plt.close(figure)
