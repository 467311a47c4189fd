"""The trainer of a recipe, with its loss and its collator."""

from __future__ import annotations

from datasets import Dataset
from sentence_transformers import SentenceTransformerTrainingArguments
from transformers import Trainer, TrainerState

from pylate_fastmaxsim.recipes.config.schema import Recipe
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.kind import kind_of
from pylate_fastmaxsim.recipes.models.load import HostModel


def build_trainer(
    recipe: Recipe,
    model: HostModel,
    rows: Dataset,
    arguments: SentenceTransformerTrainingArguments,
    trainer_class: type[Trainer] | None = None,
) -> Trainer:
    """A trainer with the loss and the collator of PyLate, Sentence Transformers or colpali-engine, as they document it."""
    return kind_of(recipe.model).build_trainer(recipe.loss, model, rows, arguments, trainer_class)


def require_steps(recipe: Recipe, state: TrainerState) -> None:
    """Refuse a training without a single batch, of which the trainer only warns.

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
