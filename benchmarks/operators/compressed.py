"""Scoring of compressed documents: this package, both peers, and decompress + einsum, on one GPU.

    python -m benchmarks.operators.compressed                  # everything, written to results/compressed_operators.json
    python -m benchmarks.operators.compressed --render-only    # tables and plot of that file
    python -m benchmarks.operators.compressed --tiny --competitors fast naive --results /tmp/tiny.json   # on a CPU

A cell is one way to score one format at one shape: time, memory and errors of the forward, and of this package also the
forward with the gradient of the queries. Each competitor has a process of its own, so that a crash ends only its own
cell. The kernels of this package are compiled before the first cell, in several processes. What may take minutes comes
last, the file is written after each cell, and ``--deadline`` skips what is left, so that the run ends in time. All cells
of a file are of one run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.harness.paths import RESULTS
from benchmarks.harness.records import environment, write
from benchmarks.harness.workers import Worker, failure
from benchmarks.operators.compressed_cells import AUTOTUNED_CONFIGS, SHAPES, TINY, Shape, forms
from benchmarks.operators.compressed_table import COMPETITORS, PACKED, markdown, ratios
from pylate_fastmaxsim import BatchShape
from pylate_fastmaxsim.precompile.processes import compile_calls
from pylate_fastmaxsim.precompile.shapes import calls_of

COMMAND = ["-m", "benchmarks.operators.compressed_cells"]
COUNTING = {
    "ms": "median of the device's time over calls that take several sets of inputs in turn, which the GPU's cache cannot "
    "hold; the host's time is hidden; a call of more than 0.3 s is timed three times",
    "queries": "this package rounds queries inside of the timed calls; queries of the peers are rounded before them",
    "peak_bytes": "peak of allocated memory during one call, minus what was allocated before it",
    "stored_bytes": "the documents as the competitor takes them, padding included; of residuals without the codec",
    "errors": "largest error over up to 4 queries and 8 documents, relative to the largest of these scores, in float64: "
    "'definition' of the numbers that are stored, 'uncompressed' of the bfloat16 vectors",
    "autotuning": f"the peers' lists of tiles are cut to {AUTOTUNED_CONFIGS} for each kernel, so that the run ends: those "
    "under 'autotuning' are left",
    "peers": "late-interaction-kernels 0.4.5 has no int8; flash-maxsim 0.3.0 has int8 only, of one query a call",
}


def wanted(shapes: list[Shape], competitors: list[str]) -> Iterator[tuple[Shape, str, str]]:
    """What to measure, in this order; what may take a minute comes last."""
    cells = [
        (shape, competitor, form) for shape in shapes for competitor in competitors for form in forms(competitor, shape)
    ]

    def slow(cell: tuple[Shape, str, str]) -> bool:
        shape, competitor, form = cell
        return shape.name == PACKED and competitor == "lik" and form.startswith("residual")

    return iter(sorted(cells, key=slow))


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


def summary(cell: dict) -> str:
    """One line for the terminal."""
    parts = []
    for name in ("forward", "query_gradient"):
        if name in cell:
            result = cell[name]
            memory = "" if result.get("peak_bytes") is None else f", {result['peak_bytes'] / 2**20:,.1f} MiB"
            parts.append(f"{result['ms']:.3f} ms{memory}" if "ms" in result else result["failure"])
    said = " / ".join(parts) or cell.get("failure") or f"skipped: {cell['skipped']}"
    return f"({cell.get('seconds', 0):.1f} s) {said}; errors {cell.get('errors')}"


def run(options: argparse.Namespace, device: torch.device) -> dict:
    shapes = TINY if options.tiny else SHAPES
    started = time.perf_counter()
    content: dict = {
        "environment": environment(),
        "counting": COUNTING,
        "deadline_seconds": options.deadline,
        "shapes": {shape.name: asdict(shape) for shape in shapes},
        "autotuning": {},
        "cells": {},
    }
    if device.type == "cuda":
        content["compiling"] = fill_caches(shapes)
        print("compiled ahead:", content["compiling"], flush=True)

    def left() -> float:
        return options.deadline - (time.perf_counter() - started)

    with contextlib.ExitStack() as stack:
        command = [*COMMAND, *["--tiny"] * options.tiny]
        workers = {name: stack.enter_context(Worker(command, options.timeout)) for name in options.competitors}
        for worker in workers.values():
            worker.start()  # all at once, since importing takes seconds
        for shape, competitor, form in wanted(shapes, options.competitors):
            key, worker = f"{shape.name}/{competitor}/{form}", workers[competitor]
            began = time.perf_counter()
            if left() <= 0:
                cell = {"skipped": "the deadline"}
            else:
                worker.timeout = max(min(options.timeout, left()), 1)
                cell = worker.ask({"shape": shape.name, "competitor": competitor, "form": form})
                content["autotuning"] |= cell.pop("autotuning", {})
            content["cells"][key] = {**cell, "seconds": time.perf_counter() - began}
            print(key, summary(content["cells"][key]), flush=True)
            content["seconds"] = time.perf_counter() - started
            content["ratios"] = ratios(content["cells"])
            write(options.results, content)
    return content


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS / "compressed_operators.json")
    parser.add_argument("--competitors", nargs="+", choices=list(COMPETITORS), default=list(COMPETITORS))
    parser.add_argument("--tiny", action="store_true", help="shapes of a few tokens, also on a CPU")
    parser.add_argument("--deadline", type=float, default=340, help="start no further cell after this many seconds")
    parser.add_argument("--timeout", type=float, default=120, help="seconds a cell may take")
    parser.add_argument("--render-only", action="store_true", help="only tables and plot of the results file")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    if options.render_only:
        content = json.loads(options.results.read_text())
    elif cuda or options.tiny:
        content = run(options, torch.device("cuda" if cuda else "cpu"))
    else:
        raise SystemExit("These shapes need a CUDA GPU, and there is none; pass --tiny for a trial.")
    print("\n" + markdown(content))
    if find_spec("matplotlib") is None:
        print("\nNo plot, since matplotlib is not installed; --render-only draws it later.")
        return
    from benchmarks.operators.compressed_plots import plot  # measuring and the tables do not need matplotlib

    plot(content["cells"], options.results)


if __name__ == "__main__":
    main()
