"""The part of a saved model's card that names the recipe it was trained with."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

from pylate.models import ColBERT
from sentence_transformers import SentenceTransformerTrainer
from sentence_transformers.model_card import SentenceTransformerModelCardCallback
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import pylate_fastmaxsim
from pylate_fastmaxsim.recipes.backend import backend
from pylate_fastmaxsim.recipes.config.dump import dump_recipe
from pylate_fastmaxsim.recipes.config.schema import Recipe


def name_recipe(folder: Path, recipe: Recipe) -> None:
    """Write recipe and versions below the card that the host library wrote into ``folder``."""
    host = backend(recipe.model, __package__).HOST
    with open(folder / "README.md", "a", encoding="utf-8") as card:
        card.write(
            f"\n## Training recipe\n\nTrained with the recipe `{recipe.name}` of pylate-fastmaxsim "
            f"{pylate_fastmaxsim.__version__} ({host} {version(host)}):\n\n```yaml\n{dump_recipe(recipe)}```\n"
        )


def restore_card_metadata(trainer: SentenceTransformerTrainer, state: TrainerState, begun: ColBERT) -> None:
    """Bring into the card of a trained model what its training, which is over, had brought into it.

    Of a model that no trainer had, Sentence Transformers writes the card that it was loaded with, unchanged: that of a
    checkpoint, without an evaluation and with a recipe of its own.

    Parameters
    ----------
    trainer
        Of the trained model.
    state
        Of the training at its end.
    begun
        The model that the training began with, which the card names.
    """
    data = trainer.model.model_card_data
    data.base_model, data.base_model_revision = (
        begun.model_card_data.base_model,
        begun.model_card_data.base_model_revision,
    )
    # By this it is looked for on the Hub, where it is not known yet.
    trainer.model[0].auto_model.config.name_or_path = begun[0].auto_model.config.name_or_path
    told = TrainerState()
    for teller in trainer.callback_handler.callbacks:
        if not isinstance(teller, SentenceTransformerModelCardCallback):
            continue
        teller.on_train_begin(trainer.args, told, trainer.control, model=trainer.model)
        for entry in state.log_history:
            told.global_step, told.epoch = entry["step"], entry.get("epoch")
            teller.on_log(trainer.args, told, trainer.control, model=trainer.model, logs=entry)


class NameRecipe(TrainerCallback):
    """Names the recipe in the card of every checkpoint, since each can be used as a model."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            name_recipe(Path(args.output_dir) / f"checkpoint-{state.global_step}", self.recipe)
