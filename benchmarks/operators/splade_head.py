"""SPLADE's head on one GPU: this package against nn.Linear + SpladePooling of Sentence Transformers, compiled and not.

    python -m benchmarks splade_head                    # measure what is missing, then print the tables
    python -m benchmarks splade_head --only 'tiny/*' --results /tmp/splade.json   # a trial, also on a CPU

A cell is one implementation at one shape: forward without gradient, forward + backward with the gradients of hidden states,
weight and bias, their memory, and their error against float64. Everything is bfloat16. Random vectors leave about
a third of the values positive with a bias of -2 (``dense``); a trained model leaves about 1% (``sparse``), and the bias is
set to that. Of the vocabulary of XLM-R the batch grows until stock is out of memory. An
implementation keeps its process from cell to cell, until that ends.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache

import torch
from torch import Tensor

from benchmarks.harness.lengths import log_normal
from benchmarks.harness.timing import DEVICE
from benchmarks.operators.measure import errors, forward_calls, gradient_calls, timed
from pylate_fastmaxsim import TokenBatch, reference, splade_pool

TIMEOUT = 180
PROCESS_OF = ("entry",)
ENTRIES = ("stock", "compiled", "fast")
POSITIVE = 0.01
# Texts whose values are compared with float64.
COMPARED = 2


@dataclass(frozen=True)
class Shape:
    """``texts`` padded to ``length``, of ``tokens`` on average."""

    texts: int
    length: int
    tokens: int
    vocabulary: int = 30_522
    dim: int = 768


SHAPES = {
    "tiny": Shape(3, 16, 8, 500, 32),
    "64x256": Shape(64, 256, 80),
    "256x256": Shape(256, 256, 80),
    "32x512": Shape(32, 512, 200),
    **{f"{texts}x256, 250k": Shape(texts, 256, 80, 250_002) for texts in (16, 32, 64, 128, 256, 512)},
}


@dataclass(frozen=True)
class Inputs:
    hidden: Tensor  # [N, L, d]
    mask: Tensor  # [N, L]
    packed: Tensor  # [T, d], the live rows of `hidden`
    borders: Tensor  # [N + 1]
    weight: Tensor
    bias: Tensor

    def leaves(self, entry: str) -> dict[str, Tensor]:
        return {"hidden": self.packed if entry == "fast" else self.hidden, "weight": self.weight, "bias": self.bias}

    def texts(self) -> TokenBatch:
        return TokenBatch.from_packed(self.packed, self.borders, max_length=self.hidden.shape[1])


def make_inputs(shape: Shape, sparse: bool) -> Inputs:
    draw, generator = random.Random(0), torch.Generator(DEVICE).manual_seed(0)
    lengths = torch.tensor([min(max(log_normal(shape.tokens, draw), 8), shape.length) for _ in range(shape.texts)])
    mask = (torch.arange(shape.length) < lengths[:, None]).to(DEVICE)
    borders = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(DEVICE)

    def normal(*size: int, deviation: float) -> Tensor:
        return torch.empty(size, dtype=torch.bfloat16, device=DEVICE).normal_(0, deviation, generator=generator)

    # Products have a standard deviation of 0.7.
    hidden = normal(shape.texts, shape.length, shape.dim, deviation=0.5)
    weight = normal(shape.vocabulary, shape.dim, deviation=1.4 * shape.dim**-0.5)
    bias = torch.full((shape.vocabulary,), -2.0, dtype=torch.bfloat16, device=DEVICE)
    if sparse:
        maxima = torch.stack([(text[live] @ weight.T).amax(0) for text, live in zip(hidden[:8], mask[:8], strict=True)])
        bias.fill_(-maxima.float().flatten().kthvalue(int((1 - POSITIVE) * maxima.numel())).values)
    packed = hidden[mask]
    return Inputs(
        *(each.requires_grad_(each.is_floating_point()) for each in (hidden, mask, packed, borders, weight, bias))
    )


@cache
def stock() -> Callable[[Inputs], Tensor]:
    from sentence_transformers.sparse_encoder.models import SpladePooling

    pooling = SpladePooling("max").train()

    def values(inputs: Inputs) -> Tensor:
        # As the first call leaves it, which a compiled graph is made for.
        pooling.word_embedding_dimension = len(inputs.weight)
        logits = torch.nn.functional.linear(inputs.hidden, inputs.weight, inputs.bias)
        return pooling({"token_embeddings": logits, "attention_mask": inputs.mask})["sentence_embedding"]

    return values


def value_function(entry: str) -> Callable[[Inputs], Tensor]:
    """Values ``[N, V]`` of some inputs."""
    if entry == "fast":
        return lambda inputs: splade_pool(inputs.texts(), inputs.weight, inputs.bias)
    if entry == "compiled":
        torch.compiler.reset()  # a function that is compiled too often goes on uncompiled
        return torch.compile(stock(), dynamic=False)
    return stock()


def cells(options: argparse.Namespace) -> dict[str, dict]:
    """Every implementation at every shape; the tiny one only where there is no GPU."""
    shapes = {name: asdict(shape) for name, shape in SHAPES.items() if (name == "tiny") != torch.cuda.is_available()}
    pairs = itertools.product(ENTRIES, shapes.items())
    return {f"{name}/{entry}": {"shape": shape, "entry": entry} for entry, (name, shape) in pairs}


def measure(cell: dict) -> dict:
    """Times, memory and errors of one implementation at one shape; a measure that fails is a sentence."""
    values = value_function(cell["entry"])
    result: dict = {}
    for name, sparse in (("dense", False), ("sparse", True)):
        inputs = make_inputs(Shape(**cell["shape"]), sparse)
        result["live_tokens"] = len(inputs.packed)
        result[name] = measured(values, inputs, cell["entry"])
    return result


def measured(values: Callable[[Inputs], Tensor], inputs: Inputs, entry: str) -> dict:
    measures = {"forward": forward_calls(values, [inputs])}
    measures["forward_backward"] = gradient_calls(values, [inputs], lambda each: each.leaves(entry))
    found = timed(measures)
    # The comparison needs memory too, which a large batch does not leave.
    with contextlib.suppress(torch.OutOfMemoryError):
        found["positive"] = float((measures["forward"][0]() > 0).float().mean())
        found["errors"] = pooled_errors(values, inputs, entry)
    return found


def pooled_errors(values: Callable[[Inputs], Tensor], inputs: Inputs, entry: str) -> dict[str, float | None]:
    """Relative errors of the values of a few texts, and of the gradients where only these have one, against float64."""
    texts = inputs.texts() if entry == "fast" else TokenBatch.from_padded(inputs.hidden, inputs.mask)

    def definition(exact: list[Tensor]) -> Tensor:
        few = texts.with_values(exact[0].flatten(0, -2)).select(torch.arange(COMPARED, device=DEVICE))
        return reference.splade_pool(few, *exact[1:])

    return errors(values(inputs), inputs.leaves(entry), definition, (slice(COMPARED),))
