"""Losses for ``pylate.models.ColBERT``."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from pylate_fastmaxsim.integrations.encoding.encode import encode_batch
from pylate_fastmaxsim.integrations.encoding.mask_changes import MasksChanged
from pylate_fastmaxsim.integrations.models.wrappers import wrapper_attribute
from pylate_fastmaxsim.integrations.pylate.fused_head import unit_embeddings
from pylate_fastmaxsim.integrations.pylate.losses import scored_tokens
from pylate_fastmaxsim.losses.encode import by_query
from pylate_fastmaxsim.tokens import TokenBatch

Features = dict[str, Tensor]


def encode(model: nn.Module, features: Sequence[Features]) -> tuple[TokenBatch, TokenBatch]:
    """:func:`pylate_fastmaxsim.encode` of a ColBERT."""
    queries, documents = encode_batch(model, features, wrapper_attribute(model, "skiplist"), _embed)
    counts = [len(column["input_ids"]) for column in features]
    order = by_query(counts, queries.device)
    return TokenBatch.from_padded(queries, scored_tokens(model, features)), documents.select(order)


def _embed(model: nn.Module, call: Features) -> Tensor:
    try:
        return unit_embeddings(model, call, masks_stay=True)
    except MasksChanged:
        raise ValueError(
            "encode: the model changes input_ids or attention_mask, and which tokens are scored is read before it runs. "
            "Call the model and pylate_fastmaxsim.maxsim yourself."
        ) from None
