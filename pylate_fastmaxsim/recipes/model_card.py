"""The part of a saved model's card that names the recipe it was trained with."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import pylate_fastmaxsim
from pylate_fastmaxsim.recipes.load import dump_recipe
from pylate_fastmaxsim.recipes.schema import Recipe


def name_recipe(folder: Path, recipe: Recipe) -> None:
    """Write recipe and versions below the card that the host library wrote into ``folder``."""
    host = "colpali-engine" if recipe.model.visual else "PyLate"
    with open(folder / "README.md", "a", encoding="utf-8") as card:
        card.write(
            f"\n## Training recipe\n\nTrained with the recipe `{recipe.name}` of pylate-fastmaxsim "
            f"{pylate_fastmaxsim.__version__} ({host} {version(host)}):\n\n```yaml\n{dump_recipe(recipe)}```\n"
        )


class NameRecipe(TrainerCallback):
    """Names the recipe in the card of every checkpoint, since each can be used as a model."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            name_recipe(Path(args.output_dir) / f"checkpoint-{state.global_step}", self.recipe)
