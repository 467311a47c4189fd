"""Training of SPLADE models with the losses and the trainer of Sentence Transformers."""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset
from sentence_transformers import SparseEncoder
from sentence_transformers.sparse_encoder import SparseEncoderTrainer, SparseEncoderTrainingArguments, losses
from sentence_transformers.sparse_encoder.callbacks.splade_callbacks import SpladeRegularizerWeightSchedulerCallback
from sentence_transformers.sparse_encoder.data_collator import SparseEncoderDataCollator
from torch import Tensor, nn
from transformers import Trainer

from pylate_fastmaxsim.integrations.sparse_encoder.names import Router
from pylate_fastmaxsim.recipes.config.schema import LossSection
from pylate_fastmaxsim.recipes.training.documents import EachDocument, prompts_of, sides_of, spread
from pylate_fastmaxsim.recipes.training.sharded import TextTrainerMixin

HOST = "sentence-transformers"
ARGUMENTS: dict[str, Any] = {}
ARGUMENTS_CLASS = SparseEncoderTrainingArguments
CARD_TRAINER = SparseEncoderTrainer


class SparseRecipeTrainer(TextTrainerMixin, SparseEncoderTrainer):
    """The trainer of sparse encoders, which saves and resumes as that of the other text recipes."""


def build_trainer(
    loss: LossSection,
    model: SparseEncoder,
    rows: Dataset,
    arguments: SparseEncoderTrainingArguments,
    trainer_class: type[Trainer] | None,
) -> Trainer:
    """The trainer of Sentence Transformers, with its collator, the loss of the recipe and the schedule of its weights."""
    function = build_loss(loss, model)
    section = loss.regularizers
    schedule = SpladeRegularizerWeightSchedulerCallback(function, section.schedule, section.warmup_ratio)
    first = spread(next(iter(rows)))
    # Sentence Transformers would look for them in columns of texts, which not all rows have before they are read.
    model.model_card_data.widget = [{"text": text} for text in first.values() if isinstance(text, str)]
    sides = sides_of(first)
    collator = SparseEncoderDataCollator(
        # Renamed in Sentence Transformers 5.4.
        getattr(model, "preprocess", model.tokenize),
        router_mapping=sides if isinstance(model[0], Router) else {},
        prompts=prompts_of(model, sides),
    )
    return (trainer_class or SparseRecipeTrainer)(
        model=model,
        args=arguments,
        train_dataset=rows,
        loss=function,
        data_collator=EachDocument(collator),
        callbacks=[schedule],
    )


def build_loss(section: LossSection, model: SparseEncoder) -> losses.SpladeLoss:
    """``SpladeLoss`` or ``CachedSpladeLoss`` over the loss that a recipe names."""
    temperature = {} if section.temperature is None else {"temperature": section.temperature}
    if section.name != "distillation":
        main = losses.SparseMultipleNegativesRankingLoss(
            model,
            scale=1 / (section.temperature or 1.0),
            gather_across_devices=bool(section.gather_across_devices),
        )
    elif section.objective == "margin_mse":
        main = losses.SparseMarginMSELoss(model)
    else:
        main = losses.SparseDistillKLDivLoss(model, **temperature)
    weights = section.regularizers
    options: dict[str, Any] = {
        "document_regularizer_weight": weights.document_weight,
        "query_regularizer_weight": weights.query_weight,
    }
    for side in ("query", "document"):
        if getattr(weights, side) == "l1":
            options[f"{side}_regularizer"] = L1Regularizer()
        options[f"{side}_regularizer_threshold"] = getattr(weights, f"{side}_threshold")
    if section.name == "cached_contrastive" or section.mini_batch_size is not None:
        cached = {} if section.mini_batch_size is None else {"mini_batch_size": section.mini_batch_size}
        return losses.CachedSpladeLoss(model, main, **options, **cached)
    return losses.SpladeLoss(model, main, **options)


class L1Regularizer(nn.Module):
    """The mean over texts of the sum of their weights, as a regularizer of ``SpladeLoss``.

    Examples
    --------
    >>> import torch
    >>> from pylate_fastmaxsim.recipes.training.sparse import L1Regularizer
    >>> L1Regularizer().compute_loss_from_embeddings(torch.tensor([[1.0, 2.0], [0.0, 5.0]]))
    tensor(4.)
    """

    def compute_loss_from_embeddings(self, embeddings: Tensor) -> Tensor:
        """A scalar of the vectors ``[N, V]``."""
        return torch.sum(embeddings.abs(), dim=-1).mean()
