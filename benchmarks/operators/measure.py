"""Time, memory and error of one entry at one shape; the device's own rates; host time of small calls."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.harness.timing import ITERATIONS, peak_bytes, time_calls
from benchmarks.harness.workers import failure
from benchmarks.operators.competitors import Entry, Inputs, make_inputs
from benchmarks.operators.shapes import Shape

MEASURES = ("forward", "forward_winners", "forward_backward")
CACHE_BYTES = 50 * 2**20  # L2 of an H100 or H200
HOST_WARMUP_SECONDS = 1.0


def input_sets(shape: Shape, device: torch.device) -> list[Inputs]:
    """Enough sets of inputs that taking them in turn never finds one in the cache."""
    count = max(1, min(ITERATIONS, math.ceil(2 * CACHE_BYTES / shape.input_bytes()))) if device.type == "cuda" else 2
    return [make_inputs(shape, device, seed) for seed in range(count)]


def leaves(entry: Entry, inputs: Inputs) -> list[Tensor]:
    return [inputs.queries, getattr(inputs, entry.documents)]


def calls(entry: Entry, measure: str, sets: list[Inputs]) -> list[Callable[[], object]]:
    """One call for each set of inputs."""
    if measure == "forward":

        def forward(inputs: Inputs) -> Tensor:
            with torch.no_grad():
                return entry.score(inputs)

        return [lambda x=inputs: forward(x) for inputs in sets]
    sets = [inputs.differentiable() for inputs in sets]
    if measure == "forward_winners":
        return [lambda x=inputs: entry.score(x) for inputs in sets]
    with torch.no_grad():
        grad_scores = torch.randn_like(entry.score(sets[0]))
    return [lambda x=inputs: torch.autograd.grad(entry.score(x), leaves(entry, x), grad_scores) for inputs in sets]


def relative_error(output: Tensor, reference: Tensor) -> float | None:
    """``||output - reference|| / ||reference||``; ``None`` where it is not a number."""
    error = float((output.double() - reference).norm() / reference.norm())
    return error if math.isfinite(error) else None


def spread(count: int, most: int, device: torch.device) -> Tensor:
    """At most ``most`` different indices from 0 to ``count - 1``, the first and the last among them."""
    return torch.linspace(0, count - 1, min(count, most), device=device).round().long()


def errors(entry: Entry, shape: Shape, inputs: Inputs) -> dict[str, float | None]:
    """Relative errors of scores and gradients against float64, over a few queries and documents of the shape.

    Only their scores have a gradient, so that the gradients of their vectors depend on nothing else.
    """
    device = inputs.queries.device
    rows, columns = spread(shape.queries, 4, device), spread(shape.documents, 8, device)
    queries = inputs.queries[rows].double().requires_grad_()
    own = shape.layout == "candidates"
    documents = inputs.documents[rows][:, columns] if own else inputs.documents[columns]
    documents = documents.double().requires_grad_()
    similarities = torch.einsum("qsh,qdth->qdst" if own else "qsh,dth->qdst", queries, documents)
    if inputs.mask is not None and entry.masked:
        similarities = similarities.masked_fill(~inputs.mask[columns][:, None, :], -torch.inf)
    expected = similarities.max(dim=-1).values.sum(dim=-1)

    differentiable = entry.differentiable and shape.backward
    with torch.set_grad_enabled(differentiable):
        inputs = inputs.differentiable() if differentiable else inputs
        scores = entry.score(inputs)
    result = {"scores": relative_error(scores.detach()[rows][:, columns], expected.detach())}
    if not differentiable:
        return result
    weights = torch.randn(expected.shape, device=device, dtype=torch.float64)
    grad_scores = torch.zeros_like(scores)
    grad_scores[rows[:, None], columns] = weights.to(scores.dtype)
    weights = grad_scores[rows[:, None], columns].double()
    grad_queries, grad_documents = torch.autograd.grad(scores, leaves(entry, inputs), grad_scores)
    expected_queries, expected_documents = torch.autograd.grad(expected, [queries, documents], weights)
    result["query gradient"] = relative_error(grad_queries[rows], expected_queries)
    if entry.documents == "packed":
        starts = inputs.d_cu_seqlens.tolist()
        grad_documents = torch.cat([grad_documents[starts[j] : starts[j + 1]] for j in columns.tolist()])
        expected_documents = expected_documents[inputs.mask[columns]]
    else:
        grad_documents = grad_documents[rows][:, columns] if own else grad_documents[columns]
    result["document gradient"] = relative_error(grad_documents, expected_documents)
    return result


def measure_entry(entry: Entry, shape: Shape, sets: list[Inputs]) -> dict:
    """Every measure of an entry; one that fails is recorded as a sentence."""
    device = sets[0].queries.device
    result: dict = {}
    for measure in MEASURES if entry.differentiable and shape.backward else MEASURES[:1]:
        try:
            each = calls(entry, measure, sets)
            result[measure] = {**time_calls(each, device), "peak_bytes": peak_bytes(each[0], device)}
        except Exception as error:  # noqa: BLE001 - whatever a competitor raises is its result
            result[measure] = {"failure": failure(error)}
    try:
        result["errors"] = errors(entry, shape, sets[0])
    except Exception as error:  # noqa: BLE001
        result["errors"] = {"failure": failure(error)}
    return result


def ceilings(device: torch.device) -> dict:
    """Rates of large matrix products (operations a second) and of a large copy (bytes read plus written a second)."""
    cuda = device.type == "cuda"
    size, bytes_ = (8192, 2 * 2**30) if cuda else (256, 2**20)
    rates = {}
    precisions = [("bfloat16", "highest"), ("float16", "highest"), ("float32", "highest"), ("float32", "high")]
    before = torch.get_float32_matmul_precision()
    for dtype, precision in precisions:
        torch.set_float32_matmul_precision(precision)
        a, b = (torch.randn(size, size, device=device).to(getattr(torch, dtype)) for _ in range(2))
        timing = time_calls([lambda a=a, b=b: a @ b], device)
        rates[dtype if dtype != "float32" else f"float32 {precision}"] = 2 * size**3 / (timing["ms"] / 1e3)
    torch.set_float32_matmul_precision(before)
    source = torch.randint(256, (bytes_,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timing = time_calls([lambda: target.copy_(source)], device)
    return {
        "matmul_size": size,
        "matmul_flops_per_s": rates,
        "copy_bytes": bytes_,
        "copy_bytes_per_s": 2 * bytes_ / (timing["ms"] / 1e3),
    }


def host_time(entries: list[Entry], shape: Shape, device: torch.device) -> dict[str, dict[str, float]]:
    """Median host microseconds of one call on an input so small that the device keeps up.

    Calls of the first second are left out: launches of a young process, PyTorch's own too, cost more.
    """
    result: dict[str, dict[str, float]] = {}
    sets = [make_inputs(shape, device, seed=0)]
    for entry in entries:
        for measure in MEASURES:
            call = calls(entry, measure, sets)[0]
            times: list[float] = []
            first = time.perf_counter()
            while len(times) < 300:
                for _ in range(30):
                    began = time.perf_counter()
                    call()
                    if began - first > HOST_WARMUP_SECONDS:
                        times.append((time.perf_counter() - began) * 1e6)
                if device.type == "cuda":
                    torch.cuda.synchronize()  # so that no call finds the queue full
            result.setdefault(entry.name, {})[measure] = statistics.median(times)
    return result
