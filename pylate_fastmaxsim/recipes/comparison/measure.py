"""One of the two runs of a comparison, in a process of its own."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformerTrainingArguments
from transformers import Trainer, TrainerCallback, TrainerState
from transformers.utils import logging as transformers_logging

from pylate_fastmaxsim._memory import PeakMemory, is_out_of_memory
from pylate_fastmaxsim.comparison.gate import Gate
from pylate_fastmaxsim.comparison.runs import FINISHED, NO_BATCH, OUT_OF_MEMORY, KeptWarnings
from pylate_fastmaxsim.recipes.comparison.counters import Counted
from pylate_fastmaxsim.recipes.comparison.phases import MEASURED_STEPS, WARM_UP_STEPS, Phases, median_phases
from pylate_fastmaxsim.recipes.config.schema import Recipe
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.evaluation.evaluate import evaluate
from pylate_fastmaxsim.recipes.kind import kind_of
from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.models.load import HostModel, load_model
from pylate_fastmaxsim.recipes.plugin import plugin_of
from pylate_fastmaxsim.recipes.training.arguments import training_arguments
from pylate_fastmaxsim.recipes.training.inputs import load_data
from pylate_fastmaxsim.recipes.training.train import require_steps
from pylate_fastmaxsim.reporting.environment import environment


def measure(
    recipe: Recipe, steps_file: Path, steps_only: bool = False, untrained: bool = False, gate: Gate | None = None
) -> dict[str, Any]:
    """Train a prepared recipe once, measured step by step, and evaluate it.

    Everything else comes after the training, so that steps and memory are those of a training run.

    Parameters
    ----------
    recipe
        A recipe of which everything is on disk already (see ``prepare``).
    steps_file
        JSON lines, one per finished step, flushed after each step, so that a run that is killed leaves them.
    steps_only
        Measure only the steps and their memory.
    untrained
        Evaluate the model as it was before training as well.
    gate
        Where steps take turns with those of another process; all that follows them is one more turn.

    Returns
    -------
    ``status`` (finished, out of memory or, with ``steps_only``, no batch of this size), ``memory`` in bytes, ``phases``
    in seconds a step, ``ndcg@10`` and other metrics of the evaluation, ``untrained`` with the same metrics and
    ``untrained_seconds``, how long they took, the ``warnings`` of the plugin (what it could not accelerate, and why)
    and the environment.

    Raises
    ------
    RecipeError
        The recipe does not fit its data or this machine, or no batch could be made, without ``steps_only``.
    """
    quiet = {"save_strategy": "no", "logging_strategy": "no", "report_to": [], "disable_tqdm": True}
    arguments = training_arguments(recipe, **quiet)
    data = load_data(recipe)
    # After the data is loaded: the comparison has already shown the warnings about it.
    warnings = KeptWarnings()
    logging.getLogger("pylate_fastmaxsim").addHandler(warnings)
    model = load_model(recipe.model, arguments.device, recipe.training.seed)
    result = {
        "status": FINISHED,
        "warnings": warnings.messages,
        "environment": environment(arguments.device),
    }
    with plugin_of(recipe.fast):
        try:
            memory, state = _train(recipe, model, data.train, arguments, steps_file, gate)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return result | {"status": OUT_OF_MEMORY}
        if steps_only and not state.global_step:
            return result | {"status": NO_BATCH}
        require_steps(recipe.training, state)
        result["memory"] = memory.figures()
        if steps_only:
            return result
        result |= evaluate(recipe, model, data)
        few = training_arguments(recipe, **quiet, max_steps=WARM_UP_STEPS + MEASURED_STEPS)
        result["phases"] = _phases(recipe, model, data.train, few)
        # Also if the metrics of the trained model are None because it diverged.
        if untrained and any(each is not None for each in (data.held_out, data.collection, data.nano_beir)):
            begun = time.perf_counter()
            del model
            model = load_model(recipe.model, arguments.device, recipe.training.seed)
            result["untrained"] = evaluate(recipe, model, data)
            result["untrained_seconds"] = time.perf_counter() - begun
    return result


def _train(
    recipe: Recipe,
    model: HostModel,
    rows: Dataset,
    arguments: SentenceTransformerTrainingArguments,
    steps_file: Path,
    gate: Gate | None,
) -> tuple[PeakMemory, TrainerState]:
    with open(steps_file, "w", encoding="utf-8") as lines:
        trainer = kind_of(recipe.model).build_trainer(
            recipe.loss, model, rows, arguments, trainer_with(Counted, recipe)
        )
        trainer.add_callback(_StepWriter(trainer, lines, gate))
        memory = PeakMemory(arguments.device)
        if gate:
            gate.memory = memory
        try:
            trainer.train()
        finally:
            trainer.stop_counting()
    if gate:
        gate.steps_done()
    return memory, trainer.state


def trainer_with(mixin: type, recipe: Recipe) -> type[Trainer]:
    """The trainer of the host, which also measures."""
    kind = kind_of(recipe.model)
    return type(f"{mixin.__name__}Trainer", (mixin, kind.plain_trainer), {"kind": kind})


def _phases(
    recipe: Recipe, model: HostModel, rows: Dataset, arguments: SentenceTransformerTrainingArguments
) -> dict[str, float]:
    """Seconds of each phase of a step, in a few more steps of the trained model."""
    trainer = kind_of(recipe.model).build_trainer(recipe.loss, model, rows, arguments, trainer_with(Phases, recipe))
    trainer.train()
    return median_phases(trainer.laps)


class _StepWriter(TrainerCallback):
    """Writes one line per optimizer step. Its time includes data loading."""

    def __init__(self, trainer: Counted, lines: Any, gate: Gate | None) -> None:
        self.trainer = trainer
        self.lines = lines
        self.gate = gate
        self.last = 0.0

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        if self.gate:
            self.gate.before_step()
        self.last = self._now(args.device)

    def on_step_end(self, args, state, control, **kwargs) -> None:
        now = self._now(args.device)
        measured = {
            name: float(value) if name == "loss" else int(value) for name, value in self.trainer.measured.items()
        }
        line = {"step": state.global_step, "of": state.max_steps, "seconds": now - self.last, **measured}
        self.lines.write(json.dumps(line) + "\n")
        self.lines.flush()
        self.trainer.start_step()
        if self.gate:
            self.gate.after_step(**line)
        self.last = self._now(args.device)

    @staticmethod
    def _now(device: torch.device) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()


def main() -> None:
    """Measure the recipe that the command line names, and report through the gate."""
    gate = Gate.from_environment()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", type=Path, help="prepared recipe")
    parser.add_argument("steps", type=Path, help="JSON lines file of the steps")
    parser.add_argument("--steps-only", action="store_true", help="no evaluation and no phases")
    parser.add_argument("--untrained", action="store_true", help="evaluate the untrained model as well")
    arguments = parser.parse_args()
    # The parent shows the newest progress bar of the log, which should not be that of loading a model.
    transformers_logging.disable_progress_bar()
    recipe = load_recipe(arguments.recipe)
    try:
        result = measure(recipe, arguments.steps, arguments.steps_only, arguments.untrained, gate)
    except RecipeError as error:
        sys.exit(str(error))  # the last line of the log, which the parent quotes
    gate.finished(**result)
