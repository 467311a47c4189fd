"""Encoding by a ``pylate.models.ColBERT`` for losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from pylate.losses.contrastive import extract_skiplist_mask
from torch import Tensor, nn

from pylate_fastmaxsim.integrations.encoding.encode import encode_batch
from pylate_fastmaxsim.integrations.encoding.masks import MasksChanged
from pylate_fastmaxsim.integrations.encoding.plans import unit
from pylate_fastmaxsim.integrations.models.wrappers import wrapper_attribute
from pylate_fastmaxsim.integrations.options import current_options
from pylate_fastmaxsim.integrations.pylate.fused_head import unit_embeddings
from pylate_fastmaxsim.integrations.pylate.losses import CachedBatch, masked_documents, scored_tokens
from pylate_fastmaxsim.losses.columns import Encoded, Features, by_query, texts_in
from pylate_fastmaxsim.losses.views import View, replaced_model
from pylate_fastmaxsim.tokens import TokenBatch

UNIT_MEANS = False  # what `encode(pool_factor=...)` makes


def encoded(model: nn.Module, features: Sequence[Features]) -> Encoded:
    """Queries and documents of a batch, differentiable."""
    embed = partial(unit_embeddings, masks_stay=True)
    try:
        queries, documents = encode_batch(model, features, wrapper_attribute(model, "skiplist"), embed)
    except MasksChanged:
        raise ValueError(
            "encode: the model changes input_ids or attention_mask, and which tokens are scored is read before it runs. "
            "Call the model and pylate_fastmaxsim.maxsim yourself."
        ) from None
    return queries, *_scored(model, features, documents)


def cached(model: nn.Module, features: list[Features], loss_of: Callable[..., Tensor], **size: int | None) -> Tensor:
    """The loss of embeddings made without gradients, whose backward makes them again.

    ``loss_of`` takes what :func:`encoded` returns, and leaves gradients at it. ``size`` is ``mini_batch_size`` and
    ``mini_batch_tokens``, one of them None.
    """
    batch = CachedBatch(model, features, **size)
    loss = loss_of(batch.queries, *_scored(model, features, batch.documents))
    return batch.with_second_passes(loss) if torch.is_grad_enabled() else loss


def sum_of_answers(
    loss: nn.Module, views: Sequence[View], features: list[Features], loss_of: Callable[[list[Features]], Tensor]
) -> Tensor:
    """The weighted sum over views of a loss that calls its model and scores. ``loss_of`` calls it with columns."""
    name = type(loss).__name__
    if type(loss).__module__.startswith("pylate.") and any(view.factor > 1 for view in views):
        raise ValueError(
            f"Matryoshka: {name} of PyLate itself makes means unit vectors, which encode(pool_factor=...) does not, so that "
            "pool_factors need it accelerated, by pylate_fastmaxsim.enable(); or give ContrastiveDistillation."
        )
    columns = [dict(column) for column in features]
    embeddings = [unit(loss.model(column)["token_embeddings"]) for column in columns]
    skiplist = wrapper_attribute(loss.model, "skiplist")
    masks = extract_skiplist_mask(columns, skiplist)
    counted = min({*range(len(skiplist) + 1)} - {*skiplist})
    total = 0.0
    for view in views:
        seen = [
            view.of_padded(*column, are_documents=index > 0)
            for index, column in enumerate(zip(embeddings, masks, strict=True))
        ]
        # Losses read which tokens count from the columns.
        given = [columns[0]] + [
            {
                **column,
                "input_ids": torch.full_like(column["input_ids"], counted),
                "attention_mask": live.to(column["attention_mask"].dtype),
            }
            for column, (_, live) in zip(columns[1:], seen[1:], strict=True)
        ]
        answers = iter([values for values, _ in seen])

        def answer(texts: Features, answers=answers) -> Features:
            values = next(answers, None)
            if values is None or len(texts["input_ids"]) != len(values):
                raise ValueError(f"Matryoshka: {name} must call its model once for each column of texts, in order.")
            return {"token_embeddings": values}

        with replaced_model(loss, answer):
            total = total + view.weight * loss_of(given)
    return total


def _scored(
    model: nn.Module, features: Sequence[Features], documents: TokenBatch
) -> tuple[Tensor | None, TokenBatch, Tensor | None]:
    """Mask of queries, documents by query, and their floors."""
    order = by_query([texts_in(column) for column in features], documents.device)
    zero_floor, options = None, current_options()
    if options is not None and options.stock_masking:
        zero_floor = masked_documents(model, features[1:])[order]
    return scored_tokens(model, features), documents.select(order), zero_floor
