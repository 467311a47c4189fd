"""MaxSim of this package against late-interaction-kernels, flash-maxsim, einsum and its torch.compile, on one GPU.

    python -m benchmarks operators                         # measure what is missing, then print the tables
    python -m benchmarks operators --render                # tables and plots of the committed results
    python -m benchmarks operators --shapes in-batch KD --competitors fast lik flash --budget 120
    python -m benchmarks operators --shapes tiny --results /tmp/tiny.json     # a trial on a CPU

A cell is one competitor at one shape: forward without gradient, forward that keeps the winners, forward + backward,
their memory, and their error against float64. Every run first measures the device's own rates (matrix products and a
copy), with which its cells are compared. One process measures all cells of a run, until it ends. Compiling einsum is
slow; it is measured only where --competitors names it.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.harness.suite import command
from benchmarks.harness.workers import ask_apart
from benchmarks.operators.competitors import ENTRIES
from benchmarks.operators.measure import ceilings, host_time, input_sets, measure_entry
from benchmarks.operators.results import TITLES
from benchmarks.operators.shapes import BY_NAME, GROUPS, SHAPES, Shape
from benchmarks.operators.table import markdown  # noqa: F401

MODULES = {"lik": "late_interaction_kernels", "flash": "flash_maxsim"}
HOST_SHAPE = Shape("host", "host", 4, 32, 8, 32)


def add_options(parser: argparse.ArgumentParser) -> None:
    named = [*GROUPS, *BY_NAME]
    parser.add_argument(
        "--shapes", nargs="+", metavar="NAME", choices=named, help=f"shapes, or groups: {', '.join(GROUPS)}"
    )
    parser.add_argument("--competitors", nargs="+", choices=list(TITLES), default=list(TITLES)[:-1])


def cells(options: argparse.Namespace) -> dict[str, dict]:
    named = options.shapes or [group for group in GROUPS if group != "tiny"]
    shapes = [shape for shape in SHAPES if shape.name in named or shape.group in named]
    if not torch.cuda.is_available() and any(shape.group != "tiny" for shape in shapes):
        raise SystemExit("These shapes need a CUDA GPU, and there is none; pass --shapes tiny.")
    missing = [name for name, module in MODULES.items() if name in options.competitors and find_spec(module) is None]
    if missing and any(set(missing) & set(shape.competitors) for shape in shapes):
        titles = " and ".join(TITLES[name] for name in missing)
        raise SystemExit(f'{titles} cannot be imported; pip install ".[bench]", or name others in --competitors.')
    made: dict[str, dict] = {"host": {"kind": "host"}} if "fast" in options.competitors else {}
    for shape in shapes:
        for each in options.competitors:
            if each in shape.competitors:
                made[f"{shape.name}/{each}"] = {"kind": "shape", "shape": asdict(shape), "competitor": each}
    return made


def process_of(_: dict) -> str:
    return "all"


def recorded(name: str, options: argparse.Namespace) -> dict:
    found = ask_apart(command(name), {"kind": "ceilings"}, options.timeout)
    if "failure" in found:
        raise SystemExit(f"The device's own rates could not be measured: {found['failure']}")
    return {"ceilings": found}


def measure(cell: dict) -> dict:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if cell["kind"] == "ceilings":
        return ceilings(device)
    if cell["kind"] == "host":
        return {"microseconds": host_time(ENTRIES["fast"](HOST_SHAPE), HOST_SHAPE, device)}
    shape = BY_NAME[cell["shape"]["name"]]
    torch.set_float32_matmul_precision(shape.precision)
    if cell["competitor"] == "compile" and device.type == "cuda":
        free, needed = torch.cuda.mem_get_info()[0], shape.similarity_bytes()
        # Eager einsum holds the similarities, their masked copy and their gradient together.
        if 3 * needed > free:
            why = f"similarities of {needed / 2**30:.0f} GiB and their gradient do not fit in {free / 2**30:.0f} GiB"
            return {"failure": f"not tried: {why}"}
    sets = input_sets(shape, device)
    return {"entries": {each.name: measure_entry(each, shape, sets) for each in ENTRIES[cell["competitor"]](shape)}}


def plot(content: dict, target: Path) -> None:
    from benchmarks.operators.plots import plot_all

    plot_all(content, target)
