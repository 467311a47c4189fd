"""Compile the kernels of a recipe's training steps, so that a run finds them in Triton's cache."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass

import torch
from transformers import TrainerCallback

from pylate_fastmaxsim.recipes.config.schema import Recipe
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.models.load import load_model
from pylate_fastmaxsim.recipes.plugin import plugin_off, switched
from pylate_fastmaxsim.recipes.training.arguments import require_trainable, training_arguments
from pylate_fastmaxsim.recipes.training.inputs import load_data
from pylate_fastmaxsim.recipes.training.prepare import prepare
from pylate_fastmaxsim.recipes.training.trainer import build_trainer


@dataclass(frozen=True)
class WarmStep:
    """A batch of ``rows`` rows, and the seconds of the first and of the second training step on it."""

    rows: int
    first: float
    again: float


def nothing_to_compile(recipe: Recipe) -> str | None:
    """Why training this recipe compiles no kernel, in one sentence, or None if it does.

    Raises
    ------
    RecipeError
        This is one of several processes of a launcher, or ``PYLATE_FASTMAXSIM`` says neither on nor off.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RecipeError("warmup needs one process, whose cache all of them share; start it without a launcher.")
    if (reason := plugin_off(recipe.fast)) is not None:
        return f"{reason}, so there is nothing to compile."
    if not torch.cuda.is_available() or recipe.training.use_cpu:
        return f"{recipe.name} trains on a CPU here, where there is nothing to compile."
    return None


def warm_up(recipe: Recipe) -> list[WarmStep]:
    """Train two steps on each batch size of the recipe, and discard the result.

    The batches are the recipe's own, because tiles depend on the number of queries and documents. The second size is
    that of an epoch's last batch. Only the files of ``prepare`` are written.

    Returns
    -------
    One entry per batch size. The difference between its two steps is the time that training saves.

    Raises
    ------
    RecipeError
        The recipe does not fit its data, or its model cannot be loaded.
    """
    prepared = prepare(recipe)
    rows = load_data(prepared).train
    steps = []
    with tempfile.TemporaryDirectory() as scratch, switched(recipe.fast):
        arguments = training_arguments(
            recipe,
            output_dir=scratch,
            max_steps=2,
            gradient_accumulation_steps=1,
            batch_sampler="batch_sampler",  # each epoch is a single batch, whatever is in it
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        require_trainable(arguments)
        model = load_model(prepared.model, arguments.device, recipe.training.seed)
        for size in batch_sizes(len(rows), recipe):
            arguments.per_device_train_batch_size = size
            trainer = build_trainer(recipe, model, rows.select(range(size)), arguments)
            times = _StepTimes()
            trainer.add_callback(times)
            trainer.train()
            steps.append(WarmStep(size, *times.seconds))
    return steps


def batch_sizes(rows: int, recipe: Recipe) -> list[int]:
    """The size of a full batch, if there is one, and of an epoch's last batch, if that is smaller and not dropped."""
    size = recipe.training.per_device_train_batch_size
    rest = 0 if recipe.training.dataloader_drop_last else rows % size
    return [*([size] if rows >= size else []), *([rest] if rest else [])]


class _StepTimes(TrainerCallback):
    """Seconds of each step, without loading its batch."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._begun = 0.0

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self._begun = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if args.device.type == "cuda":
            torch.cuda.synchronize(args.device)
        self.seconds.append(time.perf_counter() - self._begun)
