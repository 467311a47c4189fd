"""One of the two runs of a recipe that is compared, in a process of its own."""

import math
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers.utils import logging as transformers_logging

import pylate_fastmaxsim
from pylate_fastmaxsim._memory import is_out_of_memory
from pylate_fastmaxsim.comparison.gate import Gate, keep_warnings
from pylate_fastmaxsim.comparison.trainer import measure_steps
from pylate_fastmaxsim.comparison.turns import OUT_OF_MEMORY
from pylate_fastmaxsim.comparison.verdict import NO_BATCH
from pylate_fastmaxsim.recipes.comparison.compare import LOGS, REFUSED
from pylate_fastmaxsim.recipes.comparison.phases import STEPS, PhaseTimer
from pylate_fastmaxsim.recipes.config.schema import EvaluationSection, Recipe
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.evaluation.evaluate import evaluate
from pylate_fastmaxsim.recipes.kind import Kind
from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.models.load import HostModel, kind_of, load_model
from pylate_fastmaxsim.recipes.plugin import plugin_of
from pylate_fastmaxsim.recipes.training.arguments import ONLY_STEPS, training_arguments
from pylate_fastmaxsim.recipes.training.inputs import load_data, prepare
from pylate_fastmaxsim.recipes.training.train import require_steps
from pylate_fastmaxsim.reporting.environment import environment

SWEEP_STEPS = 9


def measure(
    recipe: Recipe,
    gate: Gate,
    *,
    untrained: bool = False,
    batch_size: int | None = None,
    largest_batch: int = 0,
) -> dict[str, Any]:
    """Train a recipe once, its steps by turns, and evaluate the model.

    Everything else comes after the training, so that steps and memory are those of a training run. ``untrained`` evaluates
    the model as it was before training as well. ``batch_size`` measures only a few steps of this size, on all rows.
    ``largest_batch`` is the largest that will be asked for; RecipeError if the data has fewer rows.

    Returns ``status`` unless it finished (out of memory or, with ``batch_size``, no batch of this size), ``phases`` in
    seconds a step, metrics of the evaluation, ``untrained`` with the same metrics and ``untrained_seconds``, how long they
    took, ``prepare_seconds``, the ``warnings`` of the package, its ``decisions`` about padding, and the environment.
    """
    warnings = keep_warnings()
    run = _recipe_of_run(recipe, batch_size)
    kind = kind_of(recipe.model)
    arguments = training_arguments(run, kind, **ONLY_STEPS)
    begun = time.perf_counter()
    prepared = prepare(recipe)
    result = {"prepare_seconds": time.perf_counter() - begun}
    # What is prepared is that of the recipe, whatever the size of its batches.
    recipe = replace(run, data=prepared.data, model=prepared.model)
    data = load_data(recipe)
    rows = (
        math.inf if recipe.data.streaming else len(data.train) + (len(data.held_out) if recipe.evaluation.rows else 0)
    )
    if largest_batch > rows:
        raise RecipeError(
            f"--sweep: batch_size must be at most {rows}, as many rows as the data has, got {largest_batch}."
        )
    model = load_model(recipe.model, arguments.device, recipe.training.seed)
    result |= {"warnings": warnings, "environment": environment(arguments.device)}
    with plugin_of(recipe.fast):
        try:
            trainer = kind.build_trainer(recipe.loss, model, data.train, arguments)
            measure_steps(trainer, gate, partial(kind.count, model), kind.counted_module(model))
            trainer.train()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return result | {"status": OUT_OF_MEMORY}
        state = trainer.state
        result["decisions"] = pylate_fastmaxsim.status().decisions
        del trainer  # and the states of its optimizer, before the evaluation
        if batch_size is not None and not state.global_step:
            return result | {"status": NO_BATCH}
        require_steps(recipe.training, state)
        if batch_size is not None:
            return result
        result |= evaluate(recipe, model, data)
        result["phases"] = _phases(recipe, kind, model, data.train)
        # Also if the metrics of the trained model are None because it diverged.
        if untrained and data.is_evaluated:
            begun = time.perf_counter()
            del model
            model = load_model(recipe.model, arguments.device, recipe.training.seed)
            result["untrained"] = evaluate(recipe, model, data)
            result["untrained_seconds"] = time.perf_counter() - begun
    return result


def _recipe_of_run(recipe: Recipe, batch_size: int | None) -> Recipe:
    """The recipe with an output folder beside its logs; of a batch size a few steps without an evaluation."""
    recipe = replace(recipe, output_dir=str(Path(recipe.output_dir, LOGS)))
    if batch_size is None:
        return recipe
    training = replace(
        recipe.training, per_device_train_batch_size=batch_size, max_steps=SWEEP_STEPS, dataloader_drop_last=True
    )
    return replace(recipe, training=training, evaluation=EvaluationSection())


def _phases(recipe: Recipe, kind: Kind, model: HostModel, rows: Dataset) -> dict[str, float]:
    arguments = training_arguments(recipe, kind, **ONLY_STEPS, max_steps=STEPS)
    trainer = kind.build_trainer(recipe.loss, model, rows, arguments)
    timer = PhaseTimer(trainer)
    trainer.train()
    return timer.median_seconds()


def main(recipe_file: str, fast: bool, **options: Any) -> None:
    """Measure a recipe with or without this package, and report through the gate."""
    gate = Gate.from_environment()
    # The parent shows the newest progress bar of the log, which should not be that of loading a model.
    transformers_logging.disable_progress_bar()
    try:
        recipe = load_recipe(recipe_file)
        result = measure(replace(recipe, fast=replace(recipe.fast, enabled=fast)), gate, **options)
    except RecipeError as error:
        print(error, file=sys.stderr)  # the last line of the log, which the parent quotes
        sys.exit(REFUSED)
    gate.finished(**result)
