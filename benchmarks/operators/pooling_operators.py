"""Poolings beyond the maximum: this package against einsum and its torch.compile, and ragged against padded, on one GPU.

    python -m benchmarks pooling_operators
    python -m benchmarks pooling_operators --only '*/fast' '*/einsum' --results /tmp/quick.json   # tiny, on a CPU

A cell is one competitor with one pooling at one shape: forward without gradient, forward + backward, their memory, and
errors of scores and gradients against float64. Vectors are random, of unit length.

`ragged` is this package with lengths drawn evenly from 1 to half of the cap, packed; it is compared with `fast` of the
same shape, whose sequences are as many and all at the cap. Memory of forward + backward is also given without the
gradients of both inputs. The peers have no such pooling (`NO_POOLING`).
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from operator import attrgetter

import torch
from torch import Tensor

from benchmarks.harness.tables import machine, table, time_and_memory, times
from benchmarks.harness.timing import DEVICE
from benchmarks.harness.workers import or_failure
from benchmarks.operators.measure import errors, forward_calls, gradient_calls, sets_beyond_cache, spread, timed
from benchmarks.operators.shapes import Sizes
from pylate_fastmaxsim import LogSumExp, Max, Softmax, TokenBatch, TopK, pooled_scores, reference
from pylate_fastmaxsim.pooling import Pooling

TIMEOUT = 600
PROCESS_OF = ()
DIM = 128
# In the order in which they are measured.
POOLINGS: dict[str, Pooling] = {
    "softmax": Softmax(1.0),
    "top-4": TopK(4),
    "max": Max(),
    "lse": LogSumExp(0.1),
    "top-16": TopK(16),
}
NO_POOLING = (
    "late-interaction-kernels 0.4.5 computes the maximum only, and hands colpali-engine's use_smooth_max back to it; "
    "flash-maxsim 0.3.0 computes the maximum only"
)
RAGGED = ("softmax", "top-4", "lse")
COMPETITORS = {
    "fast": "this package",
    "ragged": "this package, ragged",
    "compile": "`torch.compile`",
    "einsum": "einsum",
}


SHAPES = [Sizes(256, 32, 512, 300), Sizes(128, 32, 128, 180), Sizes(64, 128, 64, 1024)]
QUICK = [Sizes(3, 8, 5, 24)]


@dataclass(frozen=True)
class Batch:
    """Queries and documents, with values that are leaves of a graph."""

    queries: TokenBatch
    documents: TokenBatch

    @property
    def leaves(self) -> dict[str, Tensor]:
        return {"query": self.queries.values, "document": self.documents.values}


def sequences(count: int, cap: int, ragged: bool, draw: random.Random, generator: torch.Generator) -> TokenBatch:
    """Unit vectors in bfloat16, packed where lengths differ."""
    lengths = [draw.randint(1, cap // 2) if ragged else cap for _ in range(count)]
    values = torch.randn(sum(lengths), DIM, device=DEVICE, generator=generator)
    values = torch.nn.functional.normalize(values, dim=-1).bfloat16().requires_grad_()
    borders = torch.tensor([0, *lengths], device=DEVICE).cumsum(0)
    batch = TokenBatch.from_packed(values, borders, max_length=max(lengths))  # as the flag passes it
    return batch if ragged else TokenBatch.from_padded(torch.zeros(count, cap, DIM, device=DEVICE)).with_values(values)


def batches(shape: Sizes, ragged: bool) -> list[Batch]:
    """Enough sets of inputs that taking them in turn never finds one in the GPU's cache."""
    draw, generator = random.Random(0), torch.Generator(DEVICE).manual_seed(0)

    def drawn() -> Batch:
        sizes = ((shape.queries, shape.query_length), (shape.documents, shape.document_length))
        return Batch(*(sequences(*size, ragged, draw, generator) for size in sizes))

    made = drawn()
    count = sets_beyond_cache(sum(values.nbytes for values in made.leaves.values()))
    return [made, *(drawn() for _ in range(count - 1))]


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


def measured(sets: list[Batch], competitor: str, pooling: Pooling) -> dict:
    """Times, memory and errors; a measure that fails is recorded as a sentence."""
    first, score = sets[0], score_function(competitor, pooling)
    measures = {"forward": forward_calls(score, sets)}
    measures["forward_backward"] = gradient_calls(score, sets, attrgetter("leaves"))
    cell = {"tokens": [len(values) for values in first.leaves.values()], **timed(measures)}
    if cell["forward_backward"].get("peak_bytes") is not None:
        gradients = sum(values.nbytes for values in first.leaves.values())
        cell["forward_backward"]["beyond_gradients_bytes"] = cell["forward_backward"]["peak_bytes"] - gradients
    return {**cell, "errors": or_failure(partial(pooled_errors, score, pooling, first))}


def pooled_errors(score: Callable[[Batch], Tensor], pooling: Pooling, batch: Batch) -> dict[str, float | None]:
    """Relative errors of scores and gradients against float64, over a few queries and documents."""
    rows, columns = spread(len(batch.queries), 4), spread(len(batch.documents), 8)

    def definition(exact: list[Tensor]) -> Tensor:
        queries, documents = batch.queries.with_values(exact[0]), batch.documents.with_values(exact[1])
        return reference.pooled_scores(queries.select(rows), documents.select(columns), pooling=pooling)

    return errors(score(batch), batch.leaves, definition, (rows[:, None], columns))


def cells(options: argparse.Namespace) -> dict[str, dict]:
    """The shape of a few tokens where there is no GPU."""
    made = {}
    for name, shape, each in itertools.product(POOLINGS, SHAPES if torch.cuda.is_available() else QUICK, COMPETITORS):
        if each != "ragged" or name in RAGGED:
            made[f"{shape.name}/{name}/{each}"] = {"shape": asdict(shape), "pooling": name, "competitor": each}
    return made


def measure(cell: dict) -> dict:
    sets = batches(Sizes(**cell["shape"]), cell["competitor"] == "ragged")
    return measured(sets, cell["competitor"], POOLINGS[cell["pooling"]])


def markdown(content: dict) -> str:
    """Forward + backward of this package, torch.compile and einsum, and how many times faster the first is."""
    cells, lines = content["cells"], []
    shown, measure = ("fast", "compile", "einsum"), "forward_backward"
    shapes = dict.fromkeys(name.partition("/")[0] for name in cells)
    for shape, (name, pooling) in itertools.product(shapes, POOLINGS.items()):
        row = [cells.get(f"{shape}/{name}/{each}", {}).get(measure, {}) for each in shown]
        gains = [times(each.get("ms"), row[0].get("ms")) for each in row[1:]]
        title = f"`{re.sub(r'[a-z]+=', '', repr(pooling))}`"
        lines.append([shape.replace(".", " against "), title, *map(time_and_memory, row), *gains])
    header = ["shape", "pooling", *(COMPETITORS[each] for each in shown), "times compiled", "times einsum"]
    made = machine(next(iter(cells.values()))["environment"], "triton")
    title = "Forward + backward, and memory beyond inputs and gradients:"
    return f"{made}. Peers have no such pooling: {NO_POOLING}.\n\n{title}\n\n{table(header, lines)}"
