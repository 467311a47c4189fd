"""How a suite runs: which cells are missing, a process that measures each, the results file, tables and plots.

A suite is a module with

- ``cells(options)``: every cell by name, in the order of measuring. A cell is what ``measure`` is given, as JSON;
- ``measure(cell)``: its figures, in a process of its own.

and, where it needs them,

- ``markdown(content)``: what is printed of a results file; by default all its times and memory;
- ``add_options(parser)``: options beside those of every suite;
- ``TIMEOUT``: seconds a cell may take, 120 by default;
- ``PROCESS_OF``: cells that are alike in these keys are measured by one process, one after the other;
- ``run(cells, ask)``: the names and figures of cells as they become known, where the order or the way of measuring is
  the suite's own. ``ask(cell)`` is the answer of a new process;
- ``recorded(name, options)``: what is recorded of this run beside machine and versions;
- ``plot(content, target)``: plots beside the results file.
"""

from __future__ import annotations

import argparse
import fnmatch
import time
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

from benchmarks.harness.paths import RESULTS, ROOT
from benchmarks.harness.records import Results, environment
from benchmarks.harness.tables import figures_table
from benchmarks.harness.turns import gate, serve_by_turns
from benchmarks.harness.workers import Worker, serve

# The folder of each suite.
SUITES = {
    path.stem: path.parent.name
    for path in sorted((ROOT / "benchmarks").glob("*/*.py"))
    if "\ndef cells(" in path.read_text(encoding="utf-8")
}
# What a line of the terminal shows of a cell.
SHOWN = ("status", "failure", "detail", "ms", "step_ms", "peak_gib", "warmup_seconds")


def suite_named(name: str) -> ModuleType:
    return import_module(f"benchmarks.{SUITES[name]}.{name}")


def command(name: str) -> list[str]:
    """The arguments of Python with which a process measures cells of a suite."""
    return ["-m", "benchmarks", name, "--worker"]


def add_options(parser: argparse.ArgumentParser, results: Path, timeout: float) -> None:
    """The options of every suite."""
    parser.add_argument("--only", nargs="+", metavar="CELL", help="measure these cells, by name or pattern")
    parser.add_argument("--again", action="store_true", help="measure finished cells again")
    parser.add_argument("--render", action="store_true", help="only the tables and plots of the results file")
    parser.add_argument("--results", type=Path, default=results, help="file of the finished cells")
    parser.add_argument("--output", type=Path, help="write here instead of over --results")
    parser.add_argument("--budget", type=float, default=float("inf"), help="start no cell after so many seconds")
    parser.add_argument("--timeout", type=float, default=timeout, help="seconds a cell may take")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)


def run_suite(name: str, arguments: list[str]) -> None:
    """Run a suite as the command line says."""
    suite = suite_named(name)
    parser = argparse.ArgumentParser(
        f"python -m benchmarks {name}", description=suite.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser, RESULTS / f"{name}.json", getattr(suite, "TIMEOUT", 120))
    getattr(suite, "add_options", lambda _: None)(parser)
    options = parser.parse_args(arguments)
    if options.worker:
        (serve_by_turns if gate() else serve)(suite.measure)
        return
    results = Results(options)
    if not options.render:
        measure(name, suite, options, results)
    print("\n" + getattr(suite, "markdown", figures_table)(results.content))
    if hasattr(suite, "plot"):
        suite.plot(results.content, results.target)


def measure(name: str, suite: ModuleType, options: argparse.Namespace, results: Results) -> None:
    """Measure the cells that are wanted and missing."""
    cells = suite.cells(options)
    if options.only:
        cells = {
            each: cell for each, cell in cells.items() if any(fnmatch.fnmatchcase(each, part) for part in options.only)
        }
        if not cells:
            raise SystemExit(f"--only: no cell of {name} is named {' or '.join(options.only)}; --render shows them.")
    cells = {each: cell for each, cell in cells.items() if results.wants(each)}
    recorded = environment() | (suite.recorded(name, options) if cells and hasattr(suite, "recorded") else {})
    found = suite.run(name, cells, options) if hasattr(suite, "run") else in_processes(name, suite, cells, options)
    for each, result in found:
        results.add(each, {**cells.get(each, {}), **result, "environment": recorded})
        print(each, {key: result[key] for key in SHOWN if key in result} or result, flush=True)
        if time.monotonic() >= results.ends:
            break


def in_processes(
    name: str, suite: ModuleType, cells: dict[str, dict], options: argparse.Namespace
) -> Iterator[tuple[str, dict]]:
    """The figures of cells, each from a new process, or those that are alike by ``PROCESS_OF`` from the same."""
    keys: Iterable[str] | None = getattr(suite, "PROCESS_OF", None)
    groups: dict[object, dict[str, dict]] = {}
    for each, cell in cells.items():
        groups.setdefault(each if keys is None else tuple(map(cell.get, keys)), {})[each] = cell
    for group in groups.values():
        with Worker(command(name), options.timeout) as worker:
            for each, cell in group.items():
                yield each, worker.ask(cell)
