"""A synthetic study of pooling: what the maximum, top-4 and softmax do to gradients, long documents and injected tokens.

    python -m benchmarks.pooling_study.run --workers 16         # measure what is missing, tables, figures
    python -m benchmarks.pooling_study.run --quick --results /tmp/pooling_study.json      # seconds; figures mean nothing
    python -m benchmarks.pooling_study.run --figures-from benchmarks/results/pooling_study.json

It follows "Spike hijacking in late-interaction retrieval" (arXiv 2604.05253): 100 concepts, tokens of queries and
documents near them, a three-layer encoder, in-batch negatives. What the text leaves open is measured in each reading:
docs/pooling_study.md. Runs on CPUs; a cell is one pooling, document length, dimension and seed, on one thread. Each is
written to the results file as soon as it is known, and a finished one is not run again. Figures are written beside
the results file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from benchmarks.harness.paths import RESULTS
from benchmarks.harness.records import environment, write
from benchmarks.pooling_study.cell import (
    BATCH,
    LEARNING_RATE,
    LENGTHS,
    PANEL_TOKENS,
    POOLINGS,
    SWEEP_DIMENSION,
    WIDTH,
    Cell,
    Size,
    measure,
)
from benchmarks.pooling_study.checks import checks, not_reproduced
from benchmarks.pooling_study.concepts import CONCEPTS, NOISE, QUERY_CONCEPTS, QUERY_TOKENS, TARGETED_NOISE
from benchmarks.pooling_study.table import INJECTION_DIMENSION, tables

QUICK = Size(pairs=64, epochs=2, injected=8)


def settings(size: Size) -> dict:
    """What results depend on beside the cell."""
    return {
        **asdict(size),
        "concepts": CONCEPTS,
        "query_tokens": QUERY_TOKENS,
        "query_concepts_in_positive": QUERY_CONCEPTS,
        "noise": NOISE,
        "targeted_noise": TARGETED_NOISE,
        "batch": BATCH,
        "width": WIDTH,
        "learning_rate": LEARNING_RATE,
    }


def cells_of(seeds: list[int]) -> list[Cell]:
    """Long ones first, so that no worker is left with one at the end."""
    shapes = [*((tokens, SWEEP_DIMENSION) for tokens in reversed(LENGTHS)), (PANEL_TOKENS, INJECTION_DIMENSION)]
    return [Cell(pooling, *shape, seed) for shape, pooling, seed in itertools.product(shapes, POOLINGS, seeds)]


def run_missing(content: dict, cells: list[Cell], size: Size, workers: int, results: Path) -> None:
    """Measure cells, ``workers`` at a time."""
    missing = [cell for cell in cells if cell.name not in content["cells"]]
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(measure, cell, size): cell for cell in missing}
        for done in as_completed(running):
            cell = running[done]
            content["cells"][cell.name] = {"cell": asdict(cell), **done.result(), "environment": environment()}
            print(cell.name, f"{done.result()['seconds']:.0f} s", flush=True)
            write(results, content)


def show(content: dict, results: Path) -> None:
    """Print the tables, and draw the figures beside the results or say how to draw them elsewhere."""
    print(*tables(content).values(), sep="\n\n")
    if find_spec("matplotlib") is None:
        print(f"No figures: matplotlib is not installed. Draw them elsewhere with --figures-from {results.name}.")
        return
    from benchmarks.pooling_study.plots import plot_all

    plot_all(content, results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS / "pooling_study.json")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--workers", type=int, default=1, help="processes at a time, one thread each")
    parser.add_argument("--quick", action="store_true", help="two epochs of one seed; needs another --results")
    parser.add_argument("--figures-from", type=Path, metavar="FILE", help="only tables and figures of a results file")
    options = parser.parse_args()
    if options.figures_from:
        content = json.loads(options.figures_from.read_text())
        show(content, options.figures_from)
        return
    size, seeds = (QUICK, [0]) if options.quick else (Size(), options.seeds)
    content: dict = {"settings": settings(size), "checks": [], "not_reproduced": [], "cells": {}}
    if options.results.exists():
        earlier = json.loads(options.results.read_text())
        if earlier["settings"] != content["settings"]:
            sys.exit(f"{options.results} was made with other settings; choose another file with --results.")
        content = earlier
    cells = cells_of(seeds)
    run_missing(content, cells, size, options.workers, options.results)
    content["checks"], content["not_reproduced"] = checks(content["cells"]), not_reproduced(content["cells"])
    content["cells"] = dict(sorted(content["cells"].items()))
    write(options.results, content)
    show(content, options.results)


if __name__ == "__main__":
    main()
