"""Losses for ``pylate.models.ColBERT``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from pylate.losses.contrastive import extract_skiplist_mask
from torch import Tensor, nn

from pylate_fastmaxsim.integrations.encoding.encode import encode_batch
from pylate_fastmaxsim.integrations.encoding.masks import MasksChanged
from pylate_fastmaxsim.integrations.encoding.plans import live_tokens
from pylate_fastmaxsim.integrations.models.wrappers import wrapper_attribute
from pylate_fastmaxsim.integrations.options import current_options
from pylate_fastmaxsim.integrations.pylate.fused_head import unit_embeddings
from pylate_fastmaxsim.integrations.pylate.gradcache import CachedBatch
from pylate_fastmaxsim.integrations.pylate.losses import scored_tokens
from pylate_fastmaxsim.integrations.pylate.normalize import unit
from pylate_fastmaxsim.losses import contrastive_distillation, matryoshka
from pylate_fastmaxsim.losses.columns import by_query, texts_in
from pylate_fastmaxsim.losses.contrastive_distillation import Encoded
from pylate_fastmaxsim.losses.matryoshka import answering
from pylate_fastmaxsim.tokens import TokenBatch

Features = dict[str, Tensor]


def encode(model: nn.Module, features: Sequence[Features]) -> tuple[TokenBatch, TokenBatch]:
    """:func:`pylate_fastmaxsim.encode` of a ColBERT."""
    queries, documents = _embedded(model, features)
    order = _by_query(features, queries.device)
    return TokenBatch.from_padded(queries, scored_tokens(model, features)), documents.select(order)


class ContrastiveDistillation(contrastive_distillation.ContrastiveDistillation):
    """Contrastive loss and distillation of a teacher's scores together, encoded once and scored once.

    ``contrastive_weight * cross_entropy(S / temperature)`` of the first document of each query against all documents of
    the batch, and ``distillation_weight * KL(teacher / teacher_temperature || S / temperature)`` over the documents of
    each query, both as means over the queries; S are MaxSim scores. With ``mini_batch_size`` or ``mini_batch_tokens``
    in one pass of GradCache. The same with and without :func:`~pylate_fastmaxsim.enable`, with which it is
    padding-free, and whose ``pooling`` and ``stock_masking`` apply.

    Parameters
    ----------
    model
        A ``pylate.models.ColBERT``.
    contrastive_weight, distillation_weight
        Factors of the two terms.
    temperature
        Of the model's scores, in both terms.
    teacher_temperature
        Of the teacher's scores.
    mini_batch_size
        GradCache: texts in a call of the encoder. Without padding a call holds at most as many tokens as so many padded
        documents.
    mini_batch_tokens
        GradCache, in its place: tokens in a call of the encoder.
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
    With queries, and N documents for each with the teacher's scores, as for PyLate's ``Distillation``; or with columns
    ``query``, ``positive``, ``negative`` and ``label``, a list of N scores::

        loss = ContrastiveDistillation(model, distillation_weight=0.5, temperature=0.5, mini_batch_tokens=16_384)
        trainer = SentenceTransformerTrainer(model=model, args=args, train_dataset=train_dataset, loss=loss, ...)
    """

    def _encoded(self, features: list[Features]) -> Encoded:
        queries, documents = _embedded(self.model, features)
        return queries, *self._scored(features, documents)

    def _cached(self, features: list[Features], loss_of: Callable[..., Tensor]) -> Tensor:
        batch = CachedBatch(
            self.model, features, mini_batch_size=self.mini_batch_size, mini_batch_tokens=self.mini_batch_tokens
        )
        loss = loss_of(batch.queries, *self._scored(features, batch.documents))
        return batch.with_second_passes(loss) if torch.is_grad_enabled() else loss

    def _scored(
        self, features: list[Features], documents: TokenBatch
    ) -> tuple[Tensor | None, TokenBatch, Tensor | None]:
        order, zero_floor, options = _by_query(features, documents.device), None, current_options()
        if options is not None and options.stock_masking:
            skiplist = wrapper_attribute(self.model, "skiplist")
            zero_floor = torch.cat([~live_tokens(column, skiplist).all(dim=1) for column in features[1:]])[order]
        return scored_tokens(self.model, features), documents.select(order), zero_floor


class Matryoshka(matryoshka.Matryoshka):
    """A loss over fewer dimensions, and over fewer tokens of each document, of one encoding.

    The weighted sum of the loss of all combinations of ``dims`` and ``document_tokens``. Inside may be PyLate's
    ``Contrastive``, ``CachedContrastive`` and ``Distillation``, :class:`ContrastiveDistillation`, and a loss of your own
    that calls ``self.model`` with each column in order and takes masks from the columns, as PyLate's do. With
    :func:`~pylate_fastmaxsim.enable` PyLate's losses are as fast inside as outside.

    Parameters
    ----------
    model
        A ``pylate.models.ColBERT``.
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

        loss = losses.CachedContrastive(model, mini_batch_size=32)
        loss = Matryoshka(model, loss, dims=(128, 64), document_tokens=(None, 32), pooled=True)
    """

    def _of_answers(self, stock: Callable[..., Tensor], features: list[Features], *labels, **named_labels) -> Tensor:
        columns = [dict(column) for column in features]
        embeddings = [unit(self.loss.model(column)["token_embeddings"]) for column in columns]
        skiplist = wrapper_attribute(self.loss.model, "skiplist")
        masks = extract_skiplist_mask(columns, skiplist)
        counted = min({*range(len(skiplist) + 1)} - {*skiplist})
        total = 0.0
        for view in self.views:
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
                    raise ValueError(
                        f"Matryoshka: {type(self.loss).__name__} must call its model once for each column of texts, in "
                        "order."
                    )
                return {"token_embeddings": values}

            with answering(self.loss, answer):
                total = total + view.weight * stock(given, *labels, **named_labels)
        return total

    def _masks_of(self, column: list[Tensor], masks: Tensor) -> list[Tensor]:
        return masks.split([len(part) for part in column])

    def _masks_for(self, masks: list[Tensor]) -> Tensor:
        return torch.cat(masks)


def _by_query(features: Sequence[Features], device: torch.device) -> Tensor:
    return by_query([texts_in(column) for column in features], device)


def _embedded(model: nn.Module, features: Sequence[Features]) -> tuple[Tensor, TokenBatch]:
    return encode_batch(model, features, wrapper_attribute(model, "skiplist"), _embed)


def _embed(model: nn.Module, call: Features) -> Tensor:
    try:
        return unit_embeddings(model, call, masks_stay=True)
    except MasksChanged:
        raise ValueError(
            "encode: the model changes input_ids or attention_mask, and which tokens are scored is read before it runs. "
            "Call the model and pylate_fastmaxsim.maxsim yourself."
        ) from None
