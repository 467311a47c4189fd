"""Losses over several views of one encoding, as Matryoshka trains fewer dimensions and fewer document tokens."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from pylate_fastmaxsim.tokens import TokenBatch

# The Matryoshka that is running: its `views` of the loss in it, and `of_stock` for one that knows none.
current: ContextVar[Any] = ContextVar("views", default=None)


def sum_over_views(
    loss_of: Callable[..., Tensor],
    queries: Tensor,
    documents: TokenBatch,
    zero_floor: Tensor | None = None,
    of_leaves: bool = False,
) -> Tensor:
    """A loss of the embeddings, or the weighted sum over the views that are to be taken of them.

    One ``of_leaves`` leaves gradients at its arguments itself; they are passed on to these.
    """
    views = current.get()
    if views is None:
        return loss_of(queries, documents, zero_floor)
    total = 0.0
    for view in views.views:
        seen = seen_queries, seen_documents, floor = view.of(queries, documents, zero_floor)
        if of_leaves:
            values = [seen_queries, seen_documents.values]
            leaves = [each.detach().requires_grad_(each.requires_grad) for each in values]
            loss = loss_of(leaves[0], seen_documents.with_values(leaves[1]), floor).detach()
            if torch.is_grad_enabled():
                torch.autograd.backward(values, [view.weight * leaf.grad for leaf in leaves])
        else:
            loss = loss_of(*seen)
        total = total + view.weight * loss
    return total
