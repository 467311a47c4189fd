"""MaxSim of this package against late-interaction-kernels, flash-maxsim, einsum and its torch.compile, on one GPU.

    python -m benchmarks operators                         # measure what is missing, then print the tables
    python -m benchmarks operators --shapes in-batch KD --competitors fast lik flash --budget 120
    python -m benchmarks operators --competitors fast einsum --results /tmp/tiny.json     # a trial on a CPU

A cell is one competitor at one shape: forward without gradient, forward that keeps the winners, forward + backward,
their memory, and their error against float64. Every run first measures the device's own rates (matrix products and a
copy), with which its cells are compared. One process measures all cells of a run, until it ends. Compiling einsum with
max-autotune is slow; it is measured only where --competitors names it.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec

import torch

from benchmarks.harness.suite import command
from benchmarks.harness.timing import DEVICE, time_calls
from benchmarks.harness.workers import ask_apart, or_failure
from benchmarks.operators.competitors import ENTRIES, TITLES, Entry, Inputs, exact_scores, make_inputs
from benchmarks.operators.measure import Calls, errors, forward_calls, gradient_calls, sets_beyond_cache, spread, timed
from benchmarks.operators.shapes import BY_NAME, GROUPS, SHAPES, Shape
from benchmarks.operators.table import markdown  # noqa: F401

PROCESS_OF = ()
MODULES = {"lik": "late_interaction_kernels", "flash": "flash_maxsim"}


def add_options(parser: argparse.ArgumentParser) -> None:
    named = [*GROUPS, *BY_NAME]
    groups = ", ".join(GROUPS)
    parser.add_argument("--shapes", nargs="+", metavar="NAME", choices=named, help=f"shapes, or groups: {groups}")
    parser.add_argument("--competitors", nargs="+", choices=list(TITLES), default=list(TITLES)[:-1])


def cells(options: argparse.Namespace) -> dict[str, dict]:
    named = options.shapes or [group for group in GROUPS if (group == "tiny") != (DEVICE.type == "cuda")]
    shapes = [shape for shape in SHAPES if shape.name in named or shape.group in named]
    missing = [name for name, module in MODULES.items() if name in options.competitors and find_spec(module) is None]
    if missing and any(set(missing) & set(shape.competitors) for shape in shapes):
        titles = " and ".join(TITLES[name] for name in missing)
        raise SystemExit(f'{titles} cannot be imported; pip install ".[bench]", or name others in --competitors.')
    return {
        f"{shape.name}/{each}": {"shape": asdict(shape), "competitor": each}
        for shape in shapes
        for each in options.competitors
        if each in shape.competitors
    }


def recorded(name: str, options: argparse.Namespace) -> dict:
    found = ask_apart(command(name), {}, options.timeout)
    if "failure" in found:
        raise SystemExit(f"The device's own rates could not be measured: {found['failure']}")
    return {"ceilings": found}


def measures(entry: Entry, shape: Shape, sets: list[Inputs]) -> dict[str, Calls]:
    """The calls of each measure, one for each set of inputs."""
    made = {"forward": forward_calls(entry.score, sets)}
    if entry.differentiable and shape.backward:
        sets = [inputs.differentiable() for inputs in sets]
        made["forward_winners"] = [partial(entry.score, inputs) for inputs in sets]
        made["forward_backward"] = gradient_calls(entry.score, sets, entry.leaves)
    return made


def entry_errors(entry: Entry, shape: Shape, inputs: Inputs) -> dict[str, float | None]:
    """Relative errors against float64, over a few queries and documents."""
    rows, columns = spread(shape.queries, 4), spread(shape.documents, 8)
    if entry.differentiable and shape.backward:
        inputs = inputs.differentiable()
    leaves = entry.leaves(inputs)
    definition = partial(exact_scores, entry, inputs, rows, columns)
    return errors(entry.score(inputs), leaves, definition, (rows[:, None], columns))


def ceilings() -> dict:
    """Rates of large matrix products (operations a second) and of a large copy (bytes read plus written a second)."""
    size, bytes_ = (8192, 2 * 2**30) if DEVICE.type == "cuda" else (256, 2**20)
    rates = {}
    before = torch.get_float32_matmul_precision()
    precisions = [("bfloat16", "highest"), ("float16", "highest"), ("float32", "highest"), ("float32", "high")]
    for dtype, precision in precisions:
        torch.set_float32_matmul_precision(precision)
        a, b = (torch.randn(size, size, device=DEVICE).to(getattr(torch, dtype)) for _ in range(2))
        timing = time_calls([lambda a=a, b=b: a @ b])
        rates[dtype if dtype != "float32" else f"float32 {precision}"] = 2 * size**3 / (timing["ms"] / 1e3)
    torch.set_float32_matmul_precision(before)
    source = torch.randint(256, (bytes_,), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    copied = 2 * bytes_ / (time_calls([lambda: target.copy_(source)])["ms"] / 1e3)
    return {"matmul_size": size, "matmul_flops_per_s": rates, "copy_bytes": bytes_, "copy_bytes_per_s": copied}


def measure(cell: dict) -> dict:
    """Times, memory and errors of a competitor; of no cell the device's own rates."""
    if not cell:
        return ceilings()
    shape = BY_NAME[cell["shape"]["name"]]
    torch.set_float32_matmul_precision(shape.precision)
    sets = [make_inputs(shape, seed) for seed in range(sets_beyond_cache(shape.input_bytes()))]
    entries = {}
    for entry in ENTRIES[cell["competitor"]](shape):
        found = entries[entry.name] = timed(measures(entry, shape, sets))
        found["errors"] = or_failure(partial(entry_errors, entry, shape, sets[0]))
    return {"entries": entries}
