"""Training of MultiVectorEncoders with the losses and the trainer of Sentence Transformers 6."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sentence_transformers
from datasets import Dataset
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from torch import nn
from transformers import Trainer

from pylate_fastmaxsim.recipes.config.schema import LossSection, Recipe
from pylate_fastmaxsim.recipes.pooling import pooling_at
from pylate_fastmaxsim.recipes.scores import score_metric
from pylate_fastmaxsim.recipes.training.callbacks import LogGradientConcentration
from pylate_fastmaxsim.recipes.training.documents import EachDocument, prompts_of, sides_of, spread
from pylate_fastmaxsim.recipes.training.gradients import text_gradient_logger
from pylate_fastmaxsim.recipes.training.pooling import FollowSchedule
from pylate_fastmaxsim.recipes.training.sharded import TextTrainerMixin

if TYPE_CHECKING:
    from sentence_transformers import MultiVectorEncoder

HOST = "sentence-transformers"
ARGUMENTS: dict[str, Any] = {}
# Of release 6. Beside an earlier one this module can be imported, but `backend` refuses the kind.
ARGUMENTS_CLASS = getattr(
    sentence_transformers, "MultiVectorEncoderTrainingArguments", SentenceTransformerTrainingArguments
)
CARD_TRAINER = getattr(sentence_transformers, "MultiVectorEncoderTrainer", SentenceTransformerTrainer)


class MultiVectorRecipeTrainer(TextTrainerMixin, CARD_TRAINER):
    """The trainer of MultiVectorEncoders, which saves and resumes as that of the other text recipes."""


def build_trainer(
    loss: LossSection,
    model: MultiVectorEncoder,
    rows: Dataset,
    arguments: SentenceTransformerTrainingArguments,
    trainer_class: type[Trainer] | None,
) -> Trainer:
    """The trainer of Sentence Transformers, with its collator and the loss of the recipe."""
    from sentence_transformers.multi_vector_encoder import MultiVectorEncoderDataCollator

    function = build_loss(loss, model)
    first = spread(next(iter(rows)))
    # Sentence Transformers would look for them in columns of texts, which not all rows have before they are read.
    model.model_card_data.widget = [{"text": text} for text in first.values() if isinstance(text, str)]
    trainer = (trainer_class or MultiVectorRecipeTrainer)(
        model=model,
        args=arguments,
        train_dataset=rows,
        loss=function,
        data_collator=EachDocument(
            MultiVectorEncoderDataCollator(model.preprocess, prompts=prompts_of(model, sides_of(first)))
        ),
    )
    if loss.pooling is not None and loss.pooling.schedule is not None:
        # Before the callbacks that report what is logged.
        trainer.callback_handler.callbacks.insert(0, FollowSchedule(loss.pooling, function.similarity_fct))
    return trainer


def build_loss(section: LossSection, model: MultiVectorEncoder) -> nn.Module:
    """The loss that a recipe names, with the options that it gives."""
    from sentence_transformers.multi_vector_encoder import losses

    names = ("mini_batch_size", "mini_batch_num_tokens", "score_mini_batch_size", "gather_across_devices")
    options = {name: value for name in names if (value := getattr(section, name)) is not None}
    distillation = section.name == "distillation"
    if section.pooling is not None:
        options["similarity_fct"] = score_metric(pooling_at(section.pooling, 0, 2), own_documents=distillation)
    if not distillation:
        cached = section.name == "cached_contrastive"
        kind = (
            losses.CachedMultiVectorMultipleNegativesRankingLoss
            if cached
            else losses.MultiVectorMultipleNegativesRankingLoss
        )
        return kind(model, scale=1 / (section.temperature or 1.0), **options)
    if section.objective == "margin_mse":
        return losses.MultiVectorMarginMSELoss(model, **options)
    return losses.MultiVectorDistillKLDivLoss(model, temperature=section.temperature or 1.0, **options)


def gradient_concentration_logger(recipe: Recipe, trainer: Trainer) -> LogGradientConcentration:
    """The callback of ``training.log_gradient_concentration``."""
    return text_gradient_logger(recipe, trainer, lambda: trainer.loss.similarity_fct)
