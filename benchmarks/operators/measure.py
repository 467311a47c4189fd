"""What suites of operators share: time and memory of measures, and errors against float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from benchmarks.harness.timing import ITERATIONS, device_ms, peak_bytes, time_calls
from benchmarks.harness.workers import failure

CACHE_BYTES = 50 * 2**20  # L2 of an H100 or H200


def sets_beyond_cache(nbytes: int, device: torch.device) -> int:
    """How many sets of inputs of so many bytes never find one in the cache when they are taken in turn."""
    return max(1, min(ITERATIONS, math.ceil(2 * CACHE_BYTES / nbytes))) if device.type == "cuda" else 2


def timed(measures: Mapping[str, Sequence[Callable[[], object]]], device: torch.device, at_once=ITERATIONS) -> dict:
    """Time and peak memory of each measure, whose calls are taken in turn; of one that fails a sentence."""
    found = {}
    for name, calls in measures.items():
        try:
            for call in calls:
                call()  # kernels may be compiled anew for some sizes
            found[name] = {**time_calls(list(calls), device, at_once), "peak_bytes": peak_bytes(calls[0], device)}
            found[name]["device_ms"] = device_ms(calls[0], device)
        except Exception as error:  # noqa: BLE001 - whatever a competitor raises is its result
            found[name] = {"failure": failure(error)}
    return found


def relative_error(output: Tensor, reference: Tensor) -> float | None:
    """``||output - reference|| / ||reference||``; ``None`` where it is not a number."""
    error = float((output.double() - reference).norm() / reference.norm())
    return error if math.isfinite(error) else None


def spread(count: int, most: int, device: torch.device) -> Tensor:
    """At most ``most`` different indices from 0 to ``count - 1``, the first and the last among them."""
    return torch.linspace(0, count - 1, min(count, most), device=device).round().long()


def exact_leaves(leaves: Sequence[Tensor]) -> list[Tensor]:
    return [leaf.detach().double().requires_grad_() for leaf in leaves]


def errors(
    scores: Tensor, leaves: Mapping[str, Tensor], expected: Tensor, exact: Sequence[Tensor], few: tuple
) -> dict[str, float | None]:
    """Relative errors of the scores at the index ``few`` and, where these alone have one, of gradients by name.

    ``expected`` are these scores in float64, of the ``exact`` leaves. Without gradients only scores are compared.
    """
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
