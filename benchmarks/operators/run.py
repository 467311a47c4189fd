"""MaxSim of this package against late-interaction-kernels, flash-maxsim, einsum and its torch.compile, on one GPU.

    python -m benchmarks.operators.run                        # measure what is missing, then print the tables
    python -m benchmarks.operators.run --render-only          # tables and plots from the committed results
    python -m benchmarks.operators.run --shapes in-batch kd --competitors fast lik flash --budget 120
    python -m benchmarks.operators.run --shapes tiny --results /tmp/tiny.json     # a trial of the command on a CPU

A cell is one competitor at one shape: forward without gradient, forward that keeps the winners, forward + backward,
their memory, and their error against float64. Each is written to the results file as soon as it is known, and a
finished one is not measured again, so several short runs on a GPU fill one file. Every run first measures the device's
own rates (matrix products and a copy), with which its cells are compared. Compiling einsum is slow; it is measured only
where --competitors names it.
"""

from __future__ import annotations

import argparse
import dataclasses
from importlib.util import find_spec

import torch

from benchmarks.harness.paths import RESULTS
from benchmarks.harness.records import Results, add_options
from benchmarks.harness.workers import Worker
from benchmarks.operators.results import TITLES
from benchmarks.operators.shapes import BY_NAME, GROUPS, SHAPES, Shape
from benchmarks.operators.table import markdown

MODULES = {"lik": "late_interaction_kernels", "flash": "flash_maxsim"}


def chosen(names: list[str] | None) -> list[Shape]:
    """The shapes of these names or groups, in their order; by default all but the tiny ones."""
    if names is None:
        return [shape for shape in SHAPES if shape.group != "tiny"]
    unknown = [name for name in names if name not in BY_NAME and name not in GROUPS]
    if unknown:
        raise SystemExit(
            f"--shapes: no shape or group {', '.join(unknown)}; groups are {', '.join(GROUPS)}, "
            f"shapes {', '.join(BY_NAME)}."
        )
    return [shape for shape in SHAPES if shape.name in names or shape.group in names]


def wanted_cells(shapes: list[Shape], competitors: list[str], results: Results) -> dict[str, dict]:
    """What to ask the worker, by cell name."""
    cells: dict[str, dict] = {}
    if "fast" in competitors:
        cells["host"] = {"kind": "host"}
    for shape in shapes:
        for competitor in competitors:
            if competitor in shape.competitors:
                name = f"{shape.name}/{competitor}"
                cells[name] = {"kind": "shape", "shape": shape.name, "competitor": competitor}
    return {name: cell for name, cell in cells.items() if results.wants(name)}


def measure(options: argparse.Namespace, results: Results) -> None:
    shapes = chosen(options.shapes)
    if not torch.cuda.is_available() and any(shape.group != "tiny" for shape in shapes):
        raise SystemExit("These shapes need a CUDA GPU, and there is none; pass --shapes tiny.")
    cells = wanted_cells(shapes, options.competitors, results)
    if not cells:
        return
    used = {cell["competitor"] for cell in cells.values() if cell["kind"] == "shape"}
    missing = [TITLES[name] for name, module in MODULES.items() if name in used and find_spec(module) is None]
    if missing:
        raise SystemExit(
            f'{" and ".join(missing)} cannot be imported; pip install ".[bench]", or name others in --competitors.'
        )
    runs = results.content["runs"]
    with Worker(["-m", "benchmarks.operators.worker"], options.timeout) as worker:
        measured = worker.ask({"kind": "ceilings"})
        if "failure" in measured:
            raise SystemExit(f"The device's own rates could not be measured: {measured['failure']}")
        runs.append({"environment": measured["environment"], "ceilings": measured["ceilings"]})
        for name, cell in cells.items():
            if results.left <= 0:
                break
            result = worker.ask(cell)
            if cell["kind"] == "shape":
                cell = {**cell, "shape": dataclasses.asdict(BY_NAME[cell["shape"]])}
            results.add(name, {**cell, "run": len(runs) - 1, **result}, summary(result))


def summary(result: dict) -> str:
    """One line for the terminal."""
    if "entries" not in result:
        return str(result.get("failure") or result["microseconds"])
    parts = []
    for name, entry in result["entries"].items():
        times = [f"{m['ms']:.4f}" if "ms" in m else m["failure"] for key, m in entry.items() if key != "errors"]
        worst = max((e for e in entry["errors"].values() if isinstance(e, float)), default=float("nan"))
        parts.append(f"{name}: {' / '.join(times)} ms, error {worst:.1e}")
    return f"({result['seconds']:.1f} s) " + "; ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, RESULTS / "operators.json", timeout=120)
    parser.add_argument("--shapes", nargs="+", metavar="NAME", help=f"shapes, or groups: {', '.join(GROUPS)}")
    parser.add_argument("--competitors", nargs="+", choices=list(TITLES), default=list(TITLES)[:-1])
    options = parser.parse_args()
    results = Results(options)
    results.content.setdefault("runs", [])
    if not options.render_only:
        measure(options, results)
    print("\n" + markdown(results.content))
    from benchmarks.operators.plots import plot_all  # last: measuring and the tables do not need matplotlib

    plot_all(results.content, results.target)


if __name__ == "__main__":
    main()
