"""SPLADE's head on one GPU: this package against nn.Linear + SpladePooling of Sentence Transformers, compiled and not.

    python -m benchmarks.operators.splade                    # measure what is missing, then print the tables
    python -m benchmarks.operators.splade --render-only      # tables of that file
    python -m benchmarks.operators.splade --shapes tiny --results /tmp/splade.json   # a trial, also on a CPU

A cell is one implementation at one shape: forward without gradient, forward + backward with the gradients of hidden states,
weight and bias, their memory, and their error against float64. Everything is bfloat16. Random vectors leave about
a third of the values positive with a bias of -2 (``dense``); a trained model leaves about 1% (``sparse``), and the bias is
set to that. Of the vocabulary of XLM-R the batch grows until stock is out of memory. An
implementation keeps its process from cell to cell, until that ends.
"""

from __future__ import annotations

import argparse
import contextlib
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache

import torch
from torch import Tensor

from benchmarks.harness.lengths import log_normal
from benchmarks.harness.paths import RESULTS
from benchmarks.harness.records import Results, add_options, environment
from benchmarks.harness.timing import peak_bytes, time_calls
from benchmarks.harness.workers import Worker, failure, serve
from benchmarks.operators.measure import relative_error
from benchmarks.operators.splade_table import ENTRIES, GROWING, SHAPE_NAMES, docs_table, out_of_memory
from pylate_fastmaxsim import TokenBatch, reference, splade_pool

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
    **dict(zip(SHAPE_NAMES, (Shape(64, 256, 80), Shape(256, 256, 80), Shape(32, 512, 200)), strict=True)),
    **{name: Shape(texts, 256, 80, 250_002) for name, texts in GROWING.items()},
}


@dataclass(frozen=True)
class Inputs:
    hidden: Tensor  # [N, L, d]
    mask: Tensor  # [N, L]
    packed: Tensor  # [T, d], the live rows of `hidden`
    borders: Tensor  # [N + 1]
    weight: Tensor
    bias: Tensor

    def leaves(self, entry: str) -> list[Tensor]:
        return [self.packed if entry == "fast" else self.hidden, self.weight, self.bias]

    def texts(self) -> TokenBatch:
        return TokenBatch.from_packed(self.packed, self.borders, max_length=self.hidden.shape[1])


def make_inputs(shape: Shape, sparse: bool, device: torch.device) -> Inputs:
    draw, generator = random.Random(0), torch.Generator(device).manual_seed(0)
    lengths = torch.tensor([min(max(log_normal(shape.tokens, draw), 8), shape.length) for _ in range(shape.texts)])
    mask = (torch.arange(shape.length) < lengths[:, None]).to(device)
    borders = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(device)

    def normal(*size: int, deviation: float) -> Tensor:
        return torch.empty(size, dtype=torch.bfloat16, device=device).normal_(0, deviation, generator=generator)

    # Products have a standard deviation of 0.7.
    hidden = normal(shape.texts, shape.length, shape.dim, deviation=0.5)
    weight = normal(shape.vocabulary, shape.dim, deviation=1.4 * shape.dim**-0.5)
    bias = torch.full((shape.vocabulary,), -2.0, dtype=torch.bfloat16, device=device)
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
    if entry == "padded":
        return lambda inputs: splade_pool(inputs.hidden, inputs.weight, inputs.bias, mask=inputs.mask)
    if entry == "compiled":
        torch.compiler.reset()  # a function that is compiled too often goes on uncompiled
        return torch.compile(stock(), dynamic=False)
    return stock()


def measure(shape: Shape, entry: str, device: torch.device) -> dict:
    """Times, memory and errors of one implementation at one shape; a measure that fails is a sentence."""
    values = value_function(entry)
    result: dict = {"environment": environment()}
    for name, sparse in (("dense", False), ("sparse", True)):
        inputs = make_inputs(shape, sparse, device)
        result["live_tokens"] = len(inputs.packed)
        result[name] = measured(values, inputs, entry, device)
    return result


def measured(values: Callable[[Inputs], Tensor], inputs: Inputs, entry: str, device: torch.device) -> dict:
    leaves = inputs.leaves(entry)
    forward = torch.no_grad()(lambda: values(inputs))
    dtype = torch.float32 if entry in ("fast", "padded") else torch.bfloat16
    grad = torch.randn(len(inputs.hidden), len(inputs.weight), device=device).to(dtype)
    measures: dict[str, Callable[[], object]] = {
        "forward": forward,
        "forward_backward": lambda: torch.autograd.grad(values(inputs), leaves, grad),
    }
    found: dict = {}
    for name, call in measures.items():
        try:
            call()  # compiles
            found[name] = {**time_calls([call], device), "peak_bytes": peak_bytes(call, device)}
        except Exception as error:  # noqa: BLE001 - whatever an implementation raises is its result
            found[name] = {"failure": failure(error)}
    # The comparison needs memory too, which a large batch does not leave.
    with contextlib.suppress(torch.OutOfMemoryError):
        found["positive"] = float((forward() > 0).float().mean())
        found["errors"] = errors(values, inputs, entry, grad)
    return found


def errors(values: Callable[[Inputs], Tensor], inputs: Inputs, entry: str, grad: Tensor) -> dict[str, float | None]:
    """Relative errors of the values of a few texts, and of the gradients where only these have one, against float64."""
    exact = [each.detach().double().requires_grad_() for each in (inputs.hidden[:COMPARED], inputs.weight, inputs.bias)]
    wanted = reference.splade_pool(TokenBatch.from_padded(exact[0], inputs.mask[:COMPARED]), *exact[1:])
    grad = grad.clone()
    grad[COMPARED:] = 0
    wanted_gradients = list(torch.autograd.grad(wanted, exact, grad[:COMPARED].double()))
    found = values(inputs)
    gradients = list(torch.autograd.grad(found, inputs.leaves(entry), grad))
    if entry == "fast":
        gradients[0] = gradients[0][: inputs.borders[COMPARED]]
        wanted_gradients[0] = wanted_gradients[0][inputs.mask[:COMPARED]]
    else:
        gradients[0] = gradients[0][:COMPARED]
    names = ("hidden gradient", "weight gradient", "bias gradient")
    result = {"values": relative_error(found[:COMPARED].detach(), wanted.detach())}
    return result | {
        name: relative_error(*pair) for name, *pair in zip(names, gradients, wanted_gradients, strict=True)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, RESULTS / "splade_head.json", timeout=180)
    named = [name for name in SHAPES if name != "tiny"]
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=named)
    parser.add_argument("--entries", nargs="+", choices=list(ENTRIES), default=list(ENTRIES))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        serve(lambda cell: measure(SHAPES[cell["shape"]], cell["entry"], device))
        return
    if not (options.render_only or torch.cuda.is_available() or options.shapes == ["tiny"]):
        raise SystemExit("These shapes need a CUDA GPU, and there is none; pass --shapes tiny.")
    results = Results(options)
    for entry in [] if options.render_only else options.entries:
        with Worker(["-m", "benchmarks.operators.splade", "--worker"], options.timeout) as worker:
            run(results, worker, entry, options.shapes)
    print("\n" + docs_table(results.cells))


def run(results: Results, worker: Worker, entry: str, shapes: list[str]) -> None:
    """Measure one implementation at all shapes; where a batch does not fit, no larger one is tried."""
    full = False
    for shape in shapes:
        name = f"{shape}/{entry}"
        if shape in GROWING and (full or entry == "padded"):
            continue
        if results.wants(name):
            cell = worker.ask({"shape": shape, "entry": entry})
            shown = {each: cell[each]["forward_backward"] for each in ("dense", "sparse") if each in cell}
            results.add(name, {"shape": asdict(SHAPES[shape]), **cell}, shown or cell)
        full = shape in GROWING and out_of_memory(results.cells.get(name, {}))


if __name__ == "__main__":
    main()
