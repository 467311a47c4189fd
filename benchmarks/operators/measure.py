"""What suites of operators share: time and memory of measures, and errors against float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from benchmarks.harness.timing import DEVICE, ITERATIONS, device_ms, peak_bytes, time_calls
from benchmarks.harness.workers import or_failure

Inputs = TypeVar("Inputs")
Calls = list[Callable[[], object]]

CACHE_BYTES = 50 * 2**20  # L2 of an H100 or H200


def sets_beyond_cache(nbytes: int) -> int:
    """How many sets of inputs of so many bytes never find one in the cache when they are taken in turn."""
    return max(1, min(ITERATIONS, math.ceil(2 * CACHE_BYTES / nbytes))) if DEVICE.type == "cuda" else 2


def timed(measures: Mapping[str, Calls]) -> dict[str, dict]:
    """Time and peak memory of each measure, whose calls are taken in turn; of one that fails a sentence."""

    def measured(calls: Calls) -> dict:
        for call in calls:
            call()  # kernels may be compiled anew for some sizes
        return {**time_calls(calls), "peak_bytes": peak_bytes(calls[0]), "device_ms": device_ms(calls[0])}

    return {name: or_failure(partial(measured, calls)) for name, calls in measures.items()}


def forward_calls(score: Callable[[Inputs], Tensor], sets: Sequence[Inputs]) -> Calls:
    """A call without gradient for each set of inputs."""
    return [partial(torch.no_grad()(score), inputs) for inputs in sets]


def gradient_calls(
    score: Callable[[Inputs], Tensor], sets: Sequence[Inputs], leaves: Callable[[Inputs], Mapping[str, Tensor]]
) -> Calls:
    """Forward + backward for each set of inputs, with the gradients of its leaves."""
    grad_scores: list[Tensor] = []

    def both(inputs: Inputs) -> tuple[Tensor, ...]:
        scores = score(inputs)
        if not grad_scores:  # in the first call, which is not timed
            grad_scores.append(torch.randn_like(scores))
        return torch.autograd.grad(scores, list(leaves(inputs).values()), grad_scores[0])

    return [partial(both, inputs) for inputs in sets]


def relative_error(output: Tensor, reference: Tensor) -> float | None:
    """``||output - reference|| / ||reference||``; ``None`` where it is not a number."""
    error = float((output.double() - reference).norm() / reference.norm())
    return error if math.isfinite(error) else None


def spread(count: int, most: int) -> Tensor:
    """At most ``most`` different indices from 0 to ``count - 1``, the first and the last among them."""
    return torch.linspace(0, count - 1, min(count, most), device=DEVICE).round().long()


def errors(
    scores: Tensor, leaves: Mapping[str, Tensor], definition: Callable[[list[Tensor]], Tensor], few: tuple
) -> dict[str, float | None]:
    """Relative errors of the scores at the index ``few`` and, where these alone have one, of gradients by name.

    ``definition`` gives these scores of the leaves in float64. Without gradients only scores are compared.
    """
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves.values()]
    expected = definition(exact)
    found = {"scores": relative_error(scores.detach()[few], expected.detach())}
    if not scores.requires_grad:
        return found
    weights = torch.randn(expected.shape, dtype=torch.float64).to(scores)
    grad_scores = torch.zeros_like(scores)
    grad_scores[few] = weights
    gradients = torch.autograd.grad(scores, list(leaves.values()), grad_scores)
    wanted = torch.autograd.grad(expected, exact, weights.double())
    return found | {
        f"{name} gradient": relative_error(*pair) for name, *pair in zip(leaves, gradients, wanted, strict=True)
    }
