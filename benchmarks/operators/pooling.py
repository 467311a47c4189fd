"""Poolings beyond the maximum: this package against einsum and its torch.compile, and ragged against padded, on one GPU.

    python -m benchmarks.operators.pooling                    # everything, written to results/pooling_operators.json
    python -m benchmarks.operators.pooling --render-only      # tables and plot of that file
    python -m benchmarks.operators.pooling --quick --competitors fast einsum --results /tmp/quick.json   # on a CPU

A cell is one competitor with one pooling at one shape: forward without gradient, forward + backward, their memory, and
errors of scores and gradients against float64. Vectors are random, of unit length. Everything is compiled before the
first cell, in several processes, and again from their caches by calls before the timed ones. What bounds are checked
for comes first, and the file is written after each cell, so that a run that is stopped leaves what it measured. All
cells of a file are of one run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.harness.paths import RESULTS
from benchmarks.harness.records import environment, write
from benchmarks.harness.timing import ITERATIONS, peak_bytes, time_calls
from benchmarks.harness.workers import failure
from benchmarks.operators.measure import CACHE_BYTES, relative_error, spread
from benchmarks.operators.pooling_table import COMPETITORS, POOLINGS, RAGGED, markdown, ratios
from pylate_fastmaxsim import LogSumExp, Max, Softmax, TokenBatch, TopK, pooled_scores, reference
from pylate_fastmaxsim.pooling import Pooling

DIM = 128
VALUES = {"softmax": Softmax(1.0), "top-4": TopK(4), "max": Max(), "lse": LogSumExp(0.1), "top-16": TopK(16)}
COUNTING = {
    "ms": "median of the device's time over calls that take several sets of inputs in turn; the host's time is hidden",
    "peak_bytes": "peak of allocated memory during one call, minus what was allocated before it (inputs, and the "
    "random gradient of the scores)",
    "beyond_gradients_bytes": "forward + backward: peak_bytes minus the bytes of the gradients of both inputs",
    "ragged": "fast with lengths drawn evenly from 1 to half of the cap, packed; compared with fast of the same shape, "
    "whose sequences are as many and all at the cap (padded, every token counted)",
    "errors": "relative errors in the norm, of scores of up to 4 queries and 8 documents, and of all gradients where "
    "only these scores have one, against float64 with the same bf16 vectors",
}
PEERS = {
    "late-interaction-kernels": "0.4.5 computes the maximum only, and hands colpali-engine's use_smooth_max back to it",
    "flash-maxsim": "0.3.0 computes the maximum only",
}


@dataclass(frozen=True)
class Shape:
    queries: int
    query_length: int
    documents: int
    document_length: int

    @property
    def name(self) -> str:
        return f"{self.queries}x{self.query_length}.{self.documents}x{self.document_length}"


SHAPES = [Shape(256, 32, 512, 300), Shape(128, 32, 128, 180), Shape(64, 128, 64, 1024)]
QUICK = [Shape(3, 8, 5, 24)]


@dataclass(frozen=True)
class Batch:
    """Queries and documents; without ragged lengths the vectors are those of a padded tensor."""

    queries: TokenBatch
    documents: TokenBatch

    @property
    def leaves(self) -> list[Tensor]:
        return [self.queries.values, self.documents.values]

    def with_leaves(self, queries: Tensor, documents: Tensor) -> Batch:
        return Batch(self.queries.with_values(queries), self.documents.with_values(documents))

    def differentiable(self) -> Batch:
        """The same memory as leaves of a graph."""
        return self.with_leaves(*(values.detach().requires_grad_() for values in self.leaves))


def sequences(count: int, cap: int, ragged: bool, draw: random.Random, generator: torch.Generator) -> TokenBatch:
    """Unit vectors in bfloat16, packed where lengths differ."""
    device = generator.device
    lengths = [draw.randint(1, cap // 2) if ragged else cap for _ in range(count)]
    values = torch.randn(sum(lengths), DIM, device=device, generator=generator)
    values = torch.nn.functional.normalize(values, dim=-1).bfloat16()
    if not ragged:
        return TokenBatch.from_padded(values.view(count, cap, DIM))
    borders = torch.tensor([0, *lengths], device=device).cumsum(0)
    return TokenBatch.from_packed(values, borders, max_length=max(lengths))  # as the flag passes it


def batches(shape: Shape, ragged: bool, device: torch.device) -> list[Batch]:
    """Enough sets of inputs that taking them in turn never finds one in the GPU's cache."""
    draw, generator = random.Random(0), torch.Generator(device).manual_seed(0)

    def drawn() -> Batch:
        return Batch(
            sequences(shape.queries, shape.query_length, ragged, draw, generator),
            sequences(shape.documents, shape.document_length, ragged, draw, generator),
        )

    made = [drawn()]
    size = sum(values.nbytes for values in made[0].leaves)
    count = min(ITERATIONS, math.ceil(2 * CACHE_BYTES / size)) if device.type == "cuda" else 2
    return made + [drawn() for _ in range(count - 1)]


def plain_scores(queries: Tensor, documents: Tensor, pooling: Pooling) -> Tensor:
    """Any pooling in plain PyTorch under bf16 autocast, ``[Nq, Nd]``; queries ``[Nq, Lq, d]``, documents ``[Nd, Ld, d]``."""
    with torch.autocast(queries.device.type, torch.bfloat16):
        similarities = torch.einsum("qsd,ntd->qnst", queries, documents)
        if isinstance(pooling, TopK):
            pooled = similarities.topk(pooling.k, dim=-1).values.float().mean(dim=-1)
        elif isinstance(pooling, Softmax):
            pooled = ((similarities / pooling.temperature).softmax(dim=-1) * similarities).sum(dim=-1)
        elif isinstance(pooling, LogSumExp):
            pooled = pooling.temperature * (similarities / pooling.temperature).logsumexp(dim=-1)
        else:
            pooled = similarities.max(dim=-1).values
        return pooled.sum(dim=-1, dtype=torch.float32)


def score_function(competitor: str, pooling: Pooling) -> Callable[[Batch], Tensor]:
    if competitor in ("fast", "ragged"):
        return lambda batch: pooled_scores(batch.queries, batch.documents, pooling=pooling)
    plain = plain_scores
    if competitor == "compile":
        torch.compiler.reset()  # a function that is compiled too often goes on uncompiled
        plain = torch.compile(plain_scores, dynamic=False)

    def scores(batch: Batch) -> Tensor:
        queries, documents = (each.values.view(len(each), -1, DIM) for each in (batch.queries, batch.documents))
        return plain(queries, documents, pooling)

    return scores


def gradients(score: Callable[[Batch], Tensor], grad_scores: Tensor, batch: Batch) -> tuple[Tensor, ...]:
    return torch.autograd.grad(score(batch), batch.leaves, grad_scores)


def errors(score: Callable[[Batch], Tensor], pooling: Pooling, batch: Batch) -> dict[str, float | None]:
    """Relative errors of scores and gradients against float64, over a few queries and documents."""
    device = batch.queries.device
    rows, columns = spread(len(batch.queries), 4, device), spread(len(batch.documents), 8, device)
    exact = batch.with_leaves(*(values.double() for values in batch.leaves)).differentiable()
    expected = reference.pooled_scores(exact.queries.select(rows), exact.documents.select(columns), pooling=pooling)
    scores = score(batch)
    found = scores[rows[:, None], columns]
    weights = torch.randn(found.shape, device=device, generator=torch.Generator(device).manual_seed(1))
    grad_scores = torch.zeros_like(scores)
    grad_scores[rows[:, None], columns] = weights
    pairs = zip(
        torch.autograd.grad(scores, batch.leaves, grad_scores),
        torch.autograd.grad(expected, exact.leaves, weights.double()),
        strict=True,
    )
    of_queries, of_documents = (relative_error(ours, right) for ours, right in pairs)
    return {
        "scores": relative_error(found.detach(), expected.detach()),
        "query gradient": of_queries,
        "document gradient": of_documents,
    }


def measure(sets: list[Batch], competitor: str, pooling: Pooling) -> dict:
    """Times, memory and errors; a measure that fails is recorded as a sentence."""
    device = sets[0].queries.device
    score = score_function(competitor, pooling)
    sets = [batch.differentiable() for batch in sets]
    first = sets[0]
    size = len(first.queries), len(first.documents)
    grad_scores = torch.randn(size, device=device, generator=torch.Generator(device).manual_seed(2))
    measures = {
        "forward": [partial(torch.no_grad()(score), batch) for batch in sets],
        "forward_backward": [partial(gradients, score, grad_scores, batch) for batch in sets],
    }
    cell: dict = {"tokens": [values.shape[0] for values in first.leaves]}
    for name, calls in measures.items():
        try:
            for call in calls:
                call()  # kernels are compiled anew for some numbers of tokens
            cell[name] = {**time_calls(calls, device), "peak_bytes": peak_bytes(calls[0], device)}
        except Exception as error:  # noqa: BLE001 - whatever a competitor raises is its result
            cell[name] = {"failure": failure(error)}
    both = cell["forward_backward"]
    if both.get("peak_bytes") is not None:
        both["beyond_gradients_bytes"] = both["peak_bytes"] - sum(values.nbytes for values in first.leaves)
    try:
        cell["errors"] = errors(score, pooling, first)
    except Exception as error:  # noqa: BLE001
        cell["errors"] = {"failure": failure(error)}
    return cell


def compile_all(name: str, shapes: list[Shape], device: torch.device) -> None:
    """Compile all that the cells of a pooling run; what fails here fails again in its cell, where it is recorded."""
    for shape in shapes:
        for competitor in ("fast", "ragged", "compile"):
            with contextlib.suppress(Exception):
                batch = batches(shape, competitor == "ragged", device)[0].differentiable()
                score = score_function(competitor, VALUES[name])
                torch.no_grad()(score)(batch)
                scores = score(batch)
                torch.autograd.grad(scores, batch.leaves, torch.ones_like(scores))


def fill_caches(shapes: list[Shape], device: torch.device) -> None:
    """Compile in one process for each pooling: the run then finds everything in the compilers' caches on disk."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
    with ProcessPoolExecutor(len(POOLINGS), get_context("spawn")) as pool:
        for name in POOLINGS:
            pool.submit(compile_all, name, shapes, device)


def wanted(shapes: list[Shape], competitors: list[str]) -> Iterator[tuple[Shape, str, str]]:
    """What to measure, in this order: poolings with bounds come first."""
    for name in POOLINGS:
        for shape in shapes:
            yield from ((shape, name, each) for each in competitors if each != "ragged" or name in RAGGED)


def summary(cell: dict) -> str:
    """One line for the terminal."""
    parts = []
    for name in ("forward", "forward_backward"):
        result = cell[name]
        memory = "" if result.get("peak_bytes") is None else f", {result['peak_bytes'] / 2**20:,.0f} MiB"
        parts.append(result.get("failure") or f"{result['ms']:.3f} ms{memory}")
    return f"({cell['seconds']:.1f} s) {' / '.join(parts)}; errors {cell['errors']}"


def run(options: argparse.Namespace, device: torch.device) -> dict:
    shapes = QUICK if options.quick else SHAPES
    made = environment()
    content: dict = {
        "environment": made,
        "counting": COUNTING,
        "peers": {name: {"version": made[name], "pooling": said} for name, said in PEERS.items()},
        "cells": {},
    }
    started = time.perf_counter()
    if "compile" in options.competitors:
        fill_caches(shapes, device)
        content["compiling_seconds"] = time.perf_counter() - started
    for shape, name, competitor in wanted(shapes, options.competitors):
        began = time.perf_counter()
        cell = measure(batches(shape, competitor == "ragged", device), competitor, VALUES[name])
        cell["seconds"] = time.perf_counter() - began
        if device.type == "cuda":
            torch.cuda.empty_cache()
        content["cells"][f"{shape.name}/{name}/{competitor}"] = cell
        print(f"{shape.name}/{name}/{competitor}", summary(cell), flush=True)
        content["seconds"] = time.perf_counter() - started
        content["ratios"] = ratios(content["cells"])
        write(options.results, content)
    return content


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS / "pooling_operators.json")
    parser.add_argument("--competitors", nargs="+", choices=list(COMPETITORS), default=list(COMPETITORS))
    parser.add_argument("--quick", action="store_true", help="a shape of a few tokens, also on a CPU")
    parser.add_argument("--render-only", action="store_true", help="only tables and plot of the results file")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    if options.render_only:
        content = json.loads(options.results.read_text())
    elif cuda or options.quick:
        content = run(options, torch.device("cuda" if cuda else "cpu"))
    else:
        raise SystemExit("These shapes need a CUDA GPU, and there is none; pass --quick for a trial.")
    print("\n" + markdown(content))
    if find_spec("matplotlib") is None:
        print("\nNo plot, since matplotlib is not installed; --render-only draws it later.")
        return
    from benchmarks.operators.pooling_plots import plot  # measuring and the tables do not need matplotlib

    plot(content["cells"], options.results)


if __name__ == "__main__":
    main()
