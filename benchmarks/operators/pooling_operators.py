"""Poolings beyond the maximum: this package against einsum and its torch.compile, and ragged against padded, on one GPU.

    python -m benchmarks pooling_operators
    python -m benchmarks pooling_operators --render
    python -m benchmarks pooling_operators --only '*/fast' '*/einsum' --results /tmp/quick.json   # tiny, on a CPU

A cell is one competitor with one pooling at one shape: forward without gradient, forward + backward, their memory, and
errors of scores and gradients against float64. Vectors are random, of unit length. Everything is compiled before the
first cell, in several processes, and again from their caches by calls before the timed ones.

`ragged` is this package with lengths drawn evenly from 1 to half of the cap, packed; it is compared with `fast` of the
same shape, whose sequences are as many and all at the cap. Memory of forward + backward is also given without the
gradients of both inputs. The peers have no such pooling (`NO_POOLING`).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import random
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.harness.tables import table
from benchmarks.harness.timing import ITERATIONS, peak_bytes, time_calls
from benchmarks.harness.workers import failure
from benchmarks.operators.measure import CACHE_BYTES, relative_error, spread
from pylate_fastmaxsim import LogSumExp, Max, Softmax, TokenBatch, TopK, pooled_scores, reference
from pylate_fastmaxsim.pooling import Pooling

DIM = 128
VALUES = {"softmax": Softmax(1.0), "top-4": TopK(4), "max": Max(), "lse": LogSumExp(0.1), "top-16": TopK(16)}
NO_POOLING = (
    "late-interaction-kernels 0.4.5 computes the maximum only, and hands colpali-engine's use_smooth_max back to it; "
    "flash-maxsim 0.3.0 computes the maximum only"
)
# In the order in which they are measured.
POOLINGS = {
    "softmax": "`Softmax(1.0)`",
    "top-4": "`TopK(4)`",
    "max": "`Max()`",
    "lse": "`LogSumExp(0.1)`",
    "top-16": "`TopK(16)`",
}
RAGGED = ("softmax", "top-4", "lse")
COMPETITORS = {
    "fast": "this package",
    "ragged": "this package, ragged",
    "compile": "`torch.compile`",
    "einsum": "einsum",
}


# Of the plot: keys of a result, with label, unit and number format.
PLOTTED = {
    "ms": ("time (ms)", 1, "{:.3g}"),
    "beyond_gradients_bytes": ("memory beyond the gradients (MiB)", 2**20, "{:,.0f}"),
}
COLOURS = {"fast": "#d62728", "ragged": "#ff9896", "compile": "#b8860b", "einsum": "#555555"}


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


def measured(sets: list[Batch], competitor: str, pooling: Pooling) -> dict:
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


def cells(options: argparse.Namespace) -> dict[str, dict]:
    """The shape of a few tokens where there is no GPU."""
    made = {}
    for name, shape, each in itertools.product(POOLINGS, SHAPES if torch.cuda.is_available() else QUICK, COMPETITORS):
        if each != "ragged" or name in RAGGED:
            made[f"{shape.name}/{name}/{each}"] = {"shape": asdict(shape), "pooling": name, "competitor": each}
    return made


def recorded(*_) -> dict:
    if torch.cuda.is_available():
        fill_caches(SHAPES, torch.device("cuda"))
    return {}


def process_of(_: dict) -> str:
    return "all"


def measure(cell: dict) -> dict:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sets = batches(Shape(**cell["shape"]), cell["competitor"] == "ragged", device)
    return measured(sets, cell["competitor"], VALUES[cell["pooling"]])


def milliseconds(cells: dict, shape: str, pooling: str, competitor: str, measure: str) -> float | None:
    return cells.get(f"{shape}/{pooling}/{competitor}", {}).get(measure, {}).get("ms")


def ratio(cells: dict, shape: str, pooling: str, competitor: str, measure: str) -> float | None:
    """How many times faster this package is; ``ragged``: how many times faster ragged batches are than padded ones."""
    ours, other = (milliseconds(cells, shape, pooling, each, measure) for each in ("fast", competitor))
    if ours is None or other is None:
        return None
    return ours / other if competitor == "ragged" else other / ours


def shapes_of(cells: dict) -> list[str]:
    return list(dict.fromkeys(name.partition("/")[0] for name in cells))


def _shape_title(shape: str) -> str:
    return shape.replace(".", " against ")


def _entry(result: dict) -> str:
    """Time, and memory: of a forward in all, of forward + backward beyond the gradients."""
    if "ms" not in result:
        failure = result.get("failure", "")
        return "out of memory" if failure.startswith("out of memory") else failure
    memory = result.get("beyond_gradients_bytes", result.get("peak_bytes"))
    return f"{result['ms']:.3g} ms" + ("" if memory is None else f", {memory / 2**20:,.0f} MiB")


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}x"


def speed_table(cells: dict, measure: str) -> str:
    """This package, torch.compile and einsum, and how many times faster the first is."""
    lines = []
    for shape in shapes_of(cells):
        for pooling, title in POOLINGS.items():
            if f"{shape}/{pooling}/fast" not in cells:
                continue
            entries = [
                _entry(cells.get(f"{shape}/{pooling}/{each}", {}).get(measure, {}))
                for each in ("fast", "compile", "einsum")
            ]
            gains = [_times(ratio(cells, shape, pooling, each, measure)) for each in ("compile", "einsum")]
            lines.append([_shape_title(shape), title, *entries, *gains])
    titles = [COMPETITORS[each] for each in ("fast", "compile", "einsum")]
    return table(["shape", "pooling", *titles, "times compiled", "times einsum"], lines)


def ragged_table(cells: dict) -> str:
    lines = []
    for shape in shapes_of(cells):
        for pooling in RAGGED:
            pair = [
                cells.get(f"{shape}/{pooling}/{each}", {}).get("forward_backward", {}) for each in ("fast", "ragged")
            ]
            if all(pair):
                gain = _times(ratio(cells, shape, pooling, "ragged", "forward_backward"))
                lines.append([_shape_title(shape), POOLINGS[pooling], *map(_entry, pair), gain])
    return table(["shape", "pooling", "padded", "ragged", "speed"], lines)


def error_table(cells: dict) -> str:
    """The largest error of each competitor and pooling over the shapes."""
    lines = []
    for competitor, title in COMPETITORS.items():
        for pooling, name in POOLINGS.items():
            found = [cell["errors"] for key, cell in cells.items() if key.endswith(f"/{pooling}/{competitor}")]
            if not found:
                continue
            entries = []
            for what in ("scores", "query gradient", "document gradient"):
                each = [errors.get(what) for errors in found]
                entries.append("no number" if None in each else f"{max(each):.1e}")
            lines.append([title, name, *entries])
    return table(["", "pooling", "scores", "query gradient", "document gradient"], lines)


def docs_table(content: dict) -> str:
    """The tables of docs/losses.md#pooling."""
    cells = content["cells"]
    made = next(iter(cells.values()))["environment"]
    return "\n\n".join(
        [
            f"{made['device']}, torch {made['torch']}, triton {made['triton']}, {made['date']}. "
            f"Peers have no such pooling: {NO_POOLING}.",
            "Forward + backward, and memory beyond inputs and gradients:",
            speed_table(cells, "forward_backward"),
            "Forward without gradient, and memory beyond inputs:",
            speed_table(cells, "forward"),
            "Ragged batches, packed, against the same number of sequences that all have the full length:",
            ragged_table(cells),
        ]
    )


def markdown(content: dict) -> str:
    """Everything, for the terminal."""
    return "\n\n".join([docs_table(content), error_table(content["cells"])])


def plot(content: dict, target: Path) -> None:
    """Bars beside the results file, a row for each shape and a group for each pooling; what failed has no bar."""
    from benchmarks.harness.plots import plt

    cells = content["cells"]
    shapes = shapes_of(cells)
    figure, axes = plt.subplots(len(shapes), len(PLOTTED), figsize=(11, 3.5 * len(shapes)), squeeze=False)
    for row, shape in zip(axes, shapes, strict=True):
        for axis, (key, (label, unit, pattern)) in zip(row, PLOTTED.items(), strict=True):
            for place, (competitor, title) in enumerate(COMPETITORS.items()):
                values = [
                    cells.get(f"{shape}/{pooling}/{competitor}", {}).get("forward_backward", {}).get(key)
                    for pooling in POOLINGS
                ]
                points = [(index, value / unit) for index, value in enumerate(values) if value]
                x = [index + (place - 1.5) * 0.2 for index, _ in points]
                colour = COLOURS[competitor]
                drawn = axis.bar(x, [y for _, y in points], 0.19, color=colour, label=title.replace("`", ""))
                axis.bar_label(drawn, fmt=pattern, fontsize=6, padding=1)
            axis.set_xticks(range(len(POOLINGS)), [name.replace("`", "") for name in POOLINGS.values()], fontsize=8)
            axis.set(ylabel=label, title=shape.replace(".", " against "))
            if axis.patches:
                axis.set_yscale("log")
            axis.grid(alpha=0.3, axis="y")
    figure.suptitle("Pooling, forward + backward, d = 128, bf16")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="lower center", ncols=len(COMPETITORS), frameon=False)
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(target.with_suffix(".png"), dpi=130)
    plt.close(figure)
