"""The trainer of a recipe: its loss, its collator, and what it must have done."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from datasets import Dataset
from pylate import losses, models, utils
from sentence_transformers import SentenceTransformerTrainingArguments
from transformers import Trainer, TrainerState

from pylate_fastmaxsim.recipes.config.schema import Recipe
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.training.sharded import RecipeTrainer

if TYPE_CHECKING:
    from pylate_fastmaxsim.recipes.models.visual import VisualRetriever


LOSSES = {
    "contrastive": losses.Contrastive,
    "cached_contrastive": losses.CachedContrastive,
    "distillation": losses.Distillation,
}


def build_trainer(
    recipe: Recipe,
    model: models.ColBERT | VisualRetriever,
    rows: Dataset,
    arguments: SentenceTransformerTrainingArguments,
    trainer_class: type[Trainer] | None = None,
) -> Trainer:
    """A trainer with the loss and the collator of PyLate or colpali-engine, as they document it."""
    options = {name: value for name, value in asdict(recipe.loss).items() if name != "name" and value is not None}
    if recipe.model.visual:
        from pylate_fastmaxsim.recipes.models.visual import build_page_trainer

        return build_page_trainer(recipe.loss.name, options, model, rows, arguments, trainer_class)
    return (trainer_class or RecipeTrainer)(
        model=model,
        args=arguments,
        train_dataset=rows,
        loss=LOSSES[recipe.loss.name](model=model, **options),
        data_collator=utils.ColBERTCollator(tokenize_fn=model.tokenize),
    )


def require_steps(recipe: Recipe, state: TrainerState) -> None:
    """Refuse what the trainer only warns of, and calls a finished training: that there was no batch to train on.

    Raises
    ------
    RecipeError
        No step was taken.
    """
    if state.global_step:
        return
    section = recipe.training
    incomplete = " or set training.dataloader_drop_last to false" if section.dataloader_drop_last else ""
    raise RecipeError(
        f"training.per_device_train_batch_size of {section.per_device_train_batch_size} with training.batch_sampler "
        f"{section.batch_sampler} leaves no batch of the rows of data, so that no step was taken; lower it{incomplete}."
    )
