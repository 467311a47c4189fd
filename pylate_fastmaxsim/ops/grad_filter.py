"""Gradient filtering: pairs whose weight is below rounding take no part in the backward of MaxSim."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

GradFilter = Literal["auto"] | None

# Of a query's total absolute weight, the most that is dropped: an eighth of what bf16 resolves (2**-9).
DROPPED_AT_MOST = 2.0**-12


def check(grad_filter: GradFilter, operator: str = "") -> None:
    """Raise ValueError unless it is one of the values that are allowed; ``operator`` is who was asked for it."""
    if grad_filter not in (None, "auto"):
        where = operator and f"{operator}: "
        raise ValueError(f'{where}grad_filter must be "auto" or None, got {grad_filter!r}.')


def filtered(scores: Tensor) -> Tensor:
    """The scores ``[Nq, P]`` as they are; their gradient passes without the pairs that do not matter.

    Of each query's pairs those are dropped whose absolute gradient is at most ``DROPPED_AT_MOST / P`` of the sum over
    the query's pairs, so that together they are at most ``DROPPED_AT_MOST`` of it. NaN passes, and of a query whose sum
    is infinite all pairs do. Nothing waits for the device. In an exported program all pairs pass.

    Examples
    --------
    >>> import torch
    >>> scores = torch.zeros(1, 3, requires_grad=True)
    >>> filtered(scores).backward(torch.tensor([[1.0, -1e-3, 1e-5]]))
    >>> scores.grad
    tensor([[ 1.0000, -0.0010,  0.0000]])
    """
    # An exported program takes the forward alone of what is below.
    return scores if _exporting() else _Filter.apply(scores)


def _exporting() -> bool:
    return torch.compiler.is_exporting()


# In a graph of torch.compile the tracer would say that it is.
_exporting._dynamo_marked_constant = True


class _Filter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores):
        # Not a view, which autograd would let nobody change in place. Nothing else has the scores.
        return scores.detach()

    @staticmethod
    def backward(ctx, gradient):
        size = gradient.abs()
        limit = size.sum(dim=1, keepdim=True) * (DROPPED_AT_MOST / max(1, gradient.shape[1]))
        # Of an infinite sum every part is small; a GradScaler has to see the infinity.
        return gradient.masked_fill((size <= limit) & limit.isfinite(), 0.0)
