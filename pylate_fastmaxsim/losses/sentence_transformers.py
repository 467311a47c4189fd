"""Losses for the ``MultiVectorEncoder`` of Sentence Transformers; public as ``pylate_fastmaxsim.losses.multi_vector``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from sentence_transformers.base.losses.merged_forward import embed_columns_padded
from sentence_transformers.multi_vector_encoder.losses import CachedMultiVectorMultipleNegativesRankingLoss
from sentence_transformers.util import cat_padded_token_embeddings
from torch import Tensor, nn

from pylate_fastmaxsim.integrations.sentence_transformers.loss_columns import noted
from pylate_fastmaxsim.integrations.sentence_transformers.losses import Batch
from pylate_fastmaxsim.losses import contrastive_distillation, matryoshka
from pylate_fastmaxsim.losses.columns import by_query, texts_in
from pylate_fastmaxsim.losses.contrastive_distillation import Encoded
from pylate_fastmaxsim.losses.matryoshka import answering
from pylate_fastmaxsim.tokens import TokenBatch

Features = dict[str, Tensor]


def encode(model: nn.Module, features: Sequence[Features]) -> tuple[TokenBatch, TokenBatch]:
    """:func:`pylate_fastmaxsim.encode` of a MultiVectorEncoder."""
    queries, mask, documents = _embedded(model, features)
    return TokenBatch.from_padded(queries, mask), documents


class ContrastiveDistillation(contrastive_distillation.ContrastiveDistillation):
    """Contrastive loss and distillation of a teacher's scores together, encoded once and scored once.

    ``contrastive_weight * cross_entropy(S / temperature)`` of the positive of each query against all documents of the
    batch, and ``distillation_weight * KL(teacher / teacher_temperature || S / temperature)`` over the documents of each
    query, both as means over the queries; S are MaxSim scores. With ``mini_batch_size`` or ``mini_batch_tokens`` in one
    pass of GradCache. The same with and without :func:`~pylate_fastmaxsim.enable`, with which encoding is padding-free,
    and whose ``pooling`` applies.

    ``MultiVectorDistillKLDivLoss`` multiplies by the square of its student temperature; here both terms have the same
    factor, whatever the temperature.

    Parameters
    ----------
    model
        A ``MultiVectorEncoder``.
    contrastive_weight, distillation_weight
        Factors of the two terms.
    temperature
        Of the model's scores, in both terms.
    teacher_temperature
        Of the teacher's scores.
    mini_batch_size
        GradCache: texts in a call of the encoder.
    mini_batch_tokens
        GradCache, in its place: tokens in a call of the encoder, without padding.
    gather_across_devices
        The documents of all processes are negatives of the contrastive term.

    Raises
    ------
    ValueError
        A temperature is not above 0, a size below 1, or both sizes are given.
    TypeError
        A size is no integer.

    Examples
    --------
    With columns ``query``, ``positive``, ``negative_1`` ... and ``label``, a list of the teacher's scores::

        loss = ContrastiveDistillation(model, distillation_weight=0.5, temperature=0.5, mini_batch_tokens=16_384)
        trainer = MultiVectorEncoderTrainer(model=model, args=args, train_dataset=train_dataset, loss=loss)
    """

    def _encoded(self, features: list[Features]) -> Encoded:
        return *_embedded(self.model, features), None

    def _cached(self, features: list[Features], loss_of: Callable[..., Tensor]) -> Tensor:
        size = {} if self.mini_batch_size is None else {"mini_batch_size": self.mini_batch_size}
        return _GradCache(self.model, loss_of, mini_batch_num_tokens=self.mini_batch_tokens, **size)(features)


class Matryoshka(matryoshka.Matryoshka):
    """A loss over fewer dimensions, and over fewer tokens of each document, of one encoding.

    The weighted sum of the loss of all combinations of ``dims`` and ``document_tokens``. Inside may be the losses of
    Sentence Transformers, :class:`ContrastiveDistillation`, and a loss of your own that calls ``self.model`` and takes
    token embeddings and masks from what it returns. With :func:`~pylate_fastmaxsim.enable` they are as fast inside as
    outside.

    Parameters
    ----------
    model
        A ``MultiVectorEncoder``.
    loss
        The loss, with the same model.
    dims
        Numbers of leading dimensions, of which embeddings are renormalised. ``None``: all dimensions only.
    weights
        One for each of ``dims``; ``None``: 1.
    document_tokens
        How many tokens of each document to score, each number from 1; ``None`` among them: all.
    token_weights
        One for each of ``document_tokens``; ``None``: 1.
    pooled
        Take not the first tokens of a document but so many means of neighbours
        (:func:`~pylate_fastmaxsim.losses.tokens.pooled_tokens`).

    Raises
    ------
    ValueError
        Neither ``dims`` nor ``document_tokens`` is given, a number is below 1, weights differ in number, or the loss has
        no ``model``. In ``forward``: one of ``dims`` is larger than the model's.
    TypeError
        One of ``dims`` or ``document_tokens`` is no integer.

    Examples
    --------
    Four losses of one encoding::

        loss = losses.CachedMultiVectorMultipleNegativesRankingLoss(model, mini_batch_num_tokens=9_600)
        loss = Matryoshka(model, loss, dims=(128, 64), document_tokens=(None, 32), pooled=True)
    """

    def _of_answers(self, stock: Callable[..., Tensor], features: list[Features], *labels, **named_labels) -> Tensor:
        model, query_ids, outputs, total = self.loss.model, features[0]["input_ids"], [], 0.0
        for view in self.views:
            made, asked = iter(outputs), []

            def answer(given: Features, *args, made=made, asked=asked, view=view, **kwargs) -> Features:
                asked.append(are_queries := given["input_ids"] is query_ids)
                output = next(made, None)
                if output is None:
                    outputs.append(output := model(given, *args, **kwargs))
                embeddings, mask = output["token_embeddings"], output["attention_mask"].bool()
                values, live = view.of_padded(embeddings, mask, not are_queries)
                return {**output, "token_embeddings": values, "attention_mask": live}

            with answering(self.loss, answer):
                total = total + view.weight * stock(features, *labels, **named_labels)
            if asked.count(True) != 1:
                raise ValueError(
                    f"Matryoshka: {type(self.loss).__name__} must call its model once with the column of queries as it is given, "
                    "or queries cannot be told from documents."
                )
        return total

    def _masks_of(self, column: list[Tensor], masks: list[Tensor]) -> list[Tensor]:
        return masks

    def _masks_for(self, masks: list[Tensor]) -> list[Tensor]:
        return masks


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


def _embedded(model: nn.Module, features: Sequence[Features]) -> tuple[Tensor, Tensor, TokenBatch]:
    """Queries ``[Nq, Lq, d]``, their mask, and documents by query."""
    columns = [dict(column) for column in features]
    with noted(Batch(model, columns)):
        queries = model(columns[0], task=columns[0].get("task", "query"))
        parts = embed_columns_padded(model, columns[1:], task_default="document")
    counts = [texts_in(column) for column in features]
    documents = _by_query(list(zip(*parts, strict=True)), counts)
    return queries["token_embeddings"], queries["attention_mask"].bool(), documents


def _by_query(columns: Sequence[tuple[Tensor, Tensor]], counts: Sequence[int]) -> TokenBatch:
    """Columns of documents ``[N, L, d]`` and their masks as one batch."""
    values, mask = cat_padded_token_embeddings(*map(list, zip(*columns, strict=True)))
    return TokenBatch.from_padded(values, mask).select(by_query(counts, values.device))
