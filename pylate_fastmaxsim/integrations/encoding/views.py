"""Losses over several views of one encoding, as Matryoshka trains fewer dimensions and fewer document tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Protocol

import torch
from torch import Tensor

from pylate_fastmaxsim.tokens import TokenBatch

# Of queries [Nq, Lq, d], documents, and which documents have a floor of 0, [Nd] or None.
LossOf = Callable[[Tensor, TokenBatch, Tensor | None], Tensor]


class View(Protocol):
    """A part of each embedding."""

    weight: float

    def of(
        self, queries: Tensor, documents: TokenBatch, zero_floor: Tensor | None
    ) -> tuple[Tensor, TokenBatch, Tensor | None]: ...


class Views(Protocol):
    """The views of the loss that is running."""

    views: Sequence[View]

    def of_stock(self, stock: Callable[..., Tensor], features: list[dict[str, Tensor]], *labels) -> Tensor:
        """The weighted sum of a loss that knows no views, and calls its model itself."""


current: ContextVar[Views | None] = ContextVar("views", default=None)


def sum_over_views(loss_of: LossOf, queries: Tensor, documents: TokenBatch, zero_floor: Tensor | None = None) -> Tensor:
    """A loss of the embeddings, or the weighted sum over the views that are to be taken of them."""
    views = current.get()
    if views is None:
        return loss_of(queries, documents, zero_floor)
    return sum(view.weight * loss_of(*view.of(queries, documents, zero_floor)) for view in views.views)


def sum_over_views_of_leaves(
    loss_of: LossOf, queries: Tensor, documents: TokenBatch, zero_floor: Tensor | None = None
) -> Tensor:
    """The same of a loss that leaves gradients at its arguments itself; they are passed on to these."""
    views = current.get()
    if views is None:
        return loss_of(queries, documents, zero_floor)
    total = 0.0
    for view in views.views:
        seen_queries, seen, floor = view.of(queries, documents, zero_floor)
        leaves = [each.detach().requires_grad_(each.requires_grad) for each in (seen_queries, seen.values)]
        total = total + view.weight * loss_of(leaves[0], seen.with_values(leaves[1]), floor).detach()
        if torch.is_grad_enabled():
            torch.autograd.backward([seen_queries, seen.values], [view.weight * leaf.grad for leaf in leaves])
    return total
