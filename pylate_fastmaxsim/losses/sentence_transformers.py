"""Losses for the ``MultiVectorEncoder`` of Sentence Transformers."""

from __future__ import annotations

from collections.abc import Sequence

from sentence_transformers.base.losses.merged_forward import embed_columns_padded
from sentence_transformers.util import cat_padded_token_embeddings
from torch import Tensor, nn

from pylate_fastmaxsim.integrations.encoding.loss_columns import noted
from pylate_fastmaxsim.integrations.sentence_transformers.joint import Batch
from pylate_fastmaxsim.losses.encode import by_query
from pylate_fastmaxsim.tokens import TokenBatch

Features = dict[str, Tensor]


def encode(model: nn.Module, features: Sequence[Features]) -> tuple[TokenBatch, TokenBatch]:
    """:func:`pylate_fastmaxsim.encode` of a MultiVectorEncoder."""
    columns = [dict(column) for column in features]
    with noted(Batch(model, columns)):
        queries = model(columns[0], task=columns[0].get("task", "query"))
        parts = embed_columns_padded(model, columns[1:], task_default="document")
    documents = TokenBatch.from_padded(*cat_padded_token_embeddings(*parts))
    counts = [len(column["input_ids"]) for column in features]
    order = by_query(counts, documents.device)
    return TokenBatch.from_padded(queries["token_embeddings"], queries["attention_mask"].bool()), documents.select(
        order
    )
