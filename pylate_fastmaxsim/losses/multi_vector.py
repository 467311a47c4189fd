"""Encoding by a ``MultiVectorEncoder`` of Sentence Transformers for losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from sentence_transformers.base.losses.merged_forward import embed_columns_padded
from sentence_transformers.multi_vector_encoder.losses import CachedMultiVectorMultipleNegativesRankingLoss
from sentence_transformers.util import cat_padded_token_embeddings
from torch import Tensor, nn

from pylate_fastmaxsim.integrations.sentence_transformers.padding_free import LossColumns, noted
from pylate_fastmaxsim.losses.columns import Encoded, Features, by_query, texts_in
from pylate_fastmaxsim.losses.views import View, replaced_model
from pylate_fastmaxsim.tokens import TokenBatch

UNIT_MEANS = True  # what HierarchicalTokenPooling makes by default


def encoded(model: nn.Module, features: Sequence[Features]) -> Encoded:
    """Queries and documents of a batch, differentiable."""
    columns = [dict(column) for column in features]
    with noted(LossColumns(model, columns)):
        queries = model(columns[0], task=columns[0].get("task", "query"))
        parts = embed_columns_padded(model, columns[1:], task_default="document")
    counts = [texts_in(column) for column in features]
    documents = _by_query(list(zip(*parts, strict=True)), counts)
    return queries["token_embeddings"], queries["attention_mask"].bool(), documents, None


def cached(model: nn.Module, features: list[Features], loss_of: Callable[..., Tensor], **size: int | None) -> Tensor:
    """The loss of embeddings made without gradients, as ``losses.pylate.cached``."""
    names = {"mini_batch_size": "mini_batch_size", "mini_batch_tokens": "mini_batch_num_tokens"}
    given = {names[name]: value for name, value in size.items() if value is not None}
    return _GradCache(model, loss_of, **given)(features)


def sum_of_answers(
    loss: nn.Module, views: Sequence[View], features: list[Features], loss_of: Callable[[list[Features]], Tensor]
) -> Tensor:
    """The weighted sum over views of a loss that calls its model and scores. ``loss_of`` calls it with columns."""
    model, query_ids, outputs, total = loss.model, features[0]["input_ids"], [], 0.0
    for view in views:
        made, asked = iter(outputs), []

        def answer(given: Features, *args, made=made, asked=asked, view=view, **kwargs) -> Features:
            asked.append(are_queries := given["input_ids"] is query_ids)
            output = next(made, None)
            if output is None:
                outputs.append(output := model(given, *args, **kwargs))
            embeddings, mask = output["token_embeddings"], output["attention_mask"].bool()
            values, live = view.of_padded(embeddings, mask, not are_queries)
            return {**output, "token_embeddings": values, "attention_mask": live}

        with replaced_model(loss, answer):
            total = total + view.weight * loss_of(features)
        if asked.count(True) != 1:
            raise ValueError(
                f"Matryoshka: {type(loss).__name__} must call its model once with the column of queries as it is given, "
                "or queries cannot be told from documents."
            )
    return total


class _GradCache(CachedMultiVectorMultipleNegativesRankingLoss):
    """Sentence Transformers' GradCache around another loss of the embeddings."""

    def __init__(self, model: nn.Module, loss_of: Callable[..., Tensor], **sizes: int | None) -> None:
        super().__init__(model, **sizes)
        self._loss_of = loss_of

    def calculate_loss(
        self, reps: list[list[Tensor]], masks_chunks: list[list[Tensor]], *, with_backward: bool = False
    ) -> Tensor:
        (queries, mask), *columns = map(cat_padded_token_embeddings, reps, masks_chunks)
        counts = [len(queries), *(len(values) for values, _ in columns)]
        documents = _by_query(columns, counts)
        leaves = [each.detach().requires_grad_(with_backward) for each in (queries, documents.values)]
        loss = self._loss_of(leaves[0], mask, documents.with_values(leaves[1]), None)
        if with_backward:
            torch.autograd.backward([queries, documents.values], [leaf.grad for leaf in leaves])
        return loss


def _by_query(columns: Sequence[tuple[Tensor, Tensor]], counts: Sequence[int]) -> TokenBatch:
    """Columns of documents ``[N, L, d]`` and their masks as one batch."""
    values, mask = cat_padded_token_embeddings(*map(list, zip(*columns, strict=True)))
    return TokenBatch.from_padded(values, mask).select(by_query(counts, values.device))
