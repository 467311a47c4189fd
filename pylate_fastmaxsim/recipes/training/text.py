"""Training of text encoders with PyLate's losses and the trainer of Sentence Transformers."""

from __future__ import annotations

import logging
from typing import Any

from datasets import Dataset
from pylate import losses, models, utils
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from transformers import Trainer

from pylate_fastmaxsim.recipes.config.schema import LossSection, Recipe
from pylate_fastmaxsim.recipes.pooling import pooling_at
from pylate_fastmaxsim.recipes.scores import score_metric
from pylate_fastmaxsim.recipes.training.callbacks import LogGradientConcentration
from pylate_fastmaxsim.recipes.training.gradients import text_gradient_logger
from pylate_fastmaxsim.recipes.training.pooling import FollowSchedule
from pylate_fastmaxsim.recipes.training.sharded import RecipeTrainer

logger = logging.getLogger(__name__)

HOST = "PyLate"
ARGUMENTS: dict[str, Any] = {}
ARGUMENTS_CLASS = SentenceTransformerTrainingArguments
CARD_TRAINER = SentenceTransformerTrainer

LOSSES = {
    "contrastive": losses.Contrastive,
    "cached_contrastive": losses.CachedContrastive,
    "distillation": losses.Distillation,
}


def build_trainer(
    loss: LossSection,
    model: models.ColBERT,
    rows: Dataset,
    arguments: SentenceTransformerTrainingArguments,
    trainer_class: type[Trainer] | None,
) -> Trainer:
    """The trainer of Sentence Transformers, with PyLate's collator and the loss of the recipe."""
    # The columns of distillation end with the scores.
    if (
        loss.name == "distillation"
        and loss.normalize_scores is not False
        and len(next(iter(rows))[rows.column_names[-1]]) == 2
    ):
        logger.warning(
            "loss.normalize_scores scales the model's scores of each query to [0, 1], and with two documents to 0 and 1 "
            "whatever they are: nothing is learned. Set it to false, or use more documents (data.n_ways)."
        )
    options = loss.options
    if loss.pooling is not None:
        metric = score_metric(pooling_at(loss.pooling, 0, 2), own_documents=loss.name == "distillation")
        options["score_metric"] = metric
    trainer = (trainer_class or RecipeTrainer)(
        model=model,
        args=arguments,
        train_dataset=rows,
        loss=LOSSES[loss.name](model=model, **options),
        data_collator=utils.ColBERTCollator(tokenize_fn=model.tokenize),
    )
    if loss.pooling is not None and loss.pooling.schedule is not None:
        # Before the callbacks that report what is logged.
        trainer.callback_handler.callbacks.insert(0, FollowSchedule(loss.pooling, metric))
    return trainer


def gradient_concentration_logger(recipe: Recipe, trainer: Trainer) -> LogGradientConcentration:
    """The callback of ``training.log_gradient_concentration``."""
    return text_gradient_logger(recipe, trainer, lambda: trainer.loss.score_metric)
