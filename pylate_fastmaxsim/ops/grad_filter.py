"""Gradient filtering: the backward skips pairs of a query and a document whose gradients are below rounding."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

GradFilter = Literal["auto"] | None

# Largest part of the sum of a query's absolute gradients that is dropped: an eighth of a bf16 rounding (2**-9).
DROPPED_AT_MOST = 2.0**-12


def check(grad_filter: GradFilter, operator: str = "") -> None:
    """Raise ValueError unless it is an allowed value; ``operator`` is the name in the error."""
    if grad_filter not in (None, "auto"):
        where = operator and f"{operator}: "
        raise ValueError(f'{where}grad_filter must be "auto" or None, got {grad_filter!r}.')


def filtered(scores: Tensor) -> Tensor:
    """The same scores ``[Nq, P]``, whose gradient drops the pairs that do not matter.

    A pair is dropped if its absolute gradient is at most ``DROPPED_AT_MOST / P`` of the sum over the query's pairs, so
    that all dropped pairs together are at most ``DROPPED_AT_MOST`` of it. NaN passes, and so do all pairs of a query
    whose sum is infinite. Nothing waits for the device. An exported program drops nothing.

    Examples
    --------
    >>> import torch
    >>> scores = torch.zeros(1, 3, requires_grad=True)
    >>> filtered(scores).backward(torch.tensor([[1.0, -1e-3, 1e-5]]))
    >>> scores.grad
    tensor([[ 1.0000, -0.0010,  0.0000]])
    """
    # Export traces the forward of an autograd.Function only.
    return scores if _exporting() else _Filter.apply(scores)


def _exporting() -> bool:
    return torch.compiler.is_exporting()


# A constant of a graph: traced by torch.compile, the function would return True.
_exporting._dynamo_marked_constant = True


class _Filter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores):
        # Not a view, so that the caller may change the scores in place.
        return scores.detach()

    @staticmethod
    def backward(ctx, gradient):
        size = gradient.abs()
        limit = size.sum(dim=1, keepdim=True) * (DROPPED_AT_MOST / max(1, gradient.shape[1]))
        # Next to an infinite sum every part is small, but a GradScaler has to see the infinity.
        return gradient.masked_fill((size <= limit) & limit.isfinite(), 0.0)
