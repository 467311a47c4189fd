"""Losses over several views of one encoding, as Matryoshka trains fewer dimensions and fewer document tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Protocol

import torch
from torch import Tensor

from pylate_fastmaxsim.tokens import TokenBatch

# Queries [Nq, Lq, d], documents, and which documents have a floor of 0, [Nd] or None.
Embedded = tuple[Tensor, TokenBatch, Tensor | None]


class View(Protocol):
    """A part of each embedding."""

    weight: float
    of: Callable[[Tensor, TokenBatch, Tensor | None], Embedded]


class Views(Protocol):
    """The views of the loss that is running, and its weighted sum if it knows none and calls its model itself."""

    views: Sequence[View]
    of_stock: Callable[..., Tensor]


current: ContextVar[Views | None] = ContextVar("views", default=None)


def sum_over_views(
    loss_of: Callable[..., Tensor], queries: Tensor, documents: TokenBatch, zero_floor: Tensor | None = None
) -> Tensor:
    """A loss of the embeddings, or the weighted sum over the views that are to be taken of them."""
    views = current.get()
    if views is None:
        return loss_of(queries, documents, zero_floor)
    return sum(view.weight * loss_of(*view.of(queries, documents, zero_floor)) for view in views.views)


def sum_over_views_of_leaves(
    loss_of: Callable[..., Tensor], queries: Tensor, documents: TokenBatch, zero_floor: Tensor | None = None
) -> Tensor:
    """A sum over views of a loss that leaves gradients at its arguments itself; they are passed on to these."""
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
