"""Train the model of a recipe with the Sentence Transformers trainer."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sentence_transformers import SentenceTransformerTrainingArguments
from transformers import ProgressCallback, Trainer, TrainerState

from pylate_fastmaxsim._memory import is_out_of_memory
from pylate_fastmaxsim.files.replace import remove_file, remove_scratch, replace_file, replace_folder
from pylate_fastmaxsim.recipes.config.schema import FastSection, Recipe
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.evaluation.evaluate import evaluate
from pylate_fastmaxsim.recipes.evaluation.targets import RecipeData
from pylate_fastmaxsim.recipes.files.inputs import require_outputs
from pylate_fastmaxsim.recipes.files.json import without_nan, write_json
from pylate_fastmaxsim.recipes.files.lock import hold_lock
from pylate_fastmaxsim.recipes.kind import kind_of
from pylate_fastmaxsim.recipes.models.load import HostModel, load_model, load_trained
from pylate_fastmaxsim.recipes.plugin import plugin_of, reason_against_plugin
from pylate_fastmaxsim.recipes.trainers.callbacks import IntervalsOfRecipe, ShuffleByEpoch, StopOnInterrupt
from pylate_fastmaxsim.recipes.trainers.checkpoints import last_checkpoint, trained_state
from pylate_fastmaxsim.recipes.trainers.epochs import FinishByEpochs, RefuseUnevenEpochs
from pylate_fastmaxsim.recipes.trainers.sharded import require_reduced_once, unsharded_loading
from pylate_fastmaxsim.recipes.training.arguments import require_trainable, training_arguments
from pylate_fastmaxsim.recipes.training.inputs import load_data
from pylate_fastmaxsim.recipes.training.model_card import (
    CARD,
    NameRecipe,
    add_metrics,
    name_recipe,
    restore_card_metadata,
)
from pylate_fastmaxsim.recipes.training.prepare import prepare
from pylate_fastmaxsim.recipes.training.run_directory import (
    MODEL_DIRECTORY,
    RECIPE_FILE,
    open_run_directory,
    require_own_checkpoints,
)
from pylate_fastmaxsim.recipes.training.trainer import build_trainer, require_steps

logger = logging.getLogger(__name__)

RESULT_FILE = "train.json"
LOCK_FILE = "train.lock"


def train(recipe: Recipe, resume: bool = True) -> dict[str, Any]:
    """Train, evaluate and save the model of a recipe.

    Checkpoints, ``train.json`` and the final model (``model/``) go to ``output_dir``. The model is saved before it is
    evaluated, and replaces that of an earlier run when it is complete. Under a distributed launcher every process calls
    this, and only the main process writes.

    Parameters
    ----------
    recipe
        What to train.
    resume
        Go on from the last complete checkpoint in ``output_dir``. Otherwise remove the checkpoints there and start over.

    Returns
    -------
    The content of ``train.json``: steps, losses, metrics of the evaluation, where the model is. Its ``fast`` has the
    options in force during the training, and in ``why_off`` why the plugin was off. The file has null for NaN and
    infinity.

    Raises
    ------
    RecipeError
        The recipe does not fit its data or this machine. Or ``output_dir`` has checkpoints of another recipe or of
        another number of processes, or another command is training there. Or there was no batch, or the evaluation ran
        out of memory.
    KeyboardInterrupt
        The user interrupted the run. A checkpoint holds everything up to the last step, or ``model/`` the result.
    """
    why_off = reason_against_plugin(recipe.fast)
    arguments = training_arguments(recipe)
    require_trainable(arguments)
    require_reduced_once(recipe, arguments)
    directory = Path(recipe.output_dir)
    sections = recipe.model, recipe.data, recipe.evaluation
    require_outputs("output_dir", directory, (RESULT_FILE, RECIPE_FILE), *sections)
    taken = (
        f"output_dir: {directory} is being trained in by another command; wait until it ends, or choose another folder."
    )
    lock = hold_lock("output_dir", directory, LOCK_FILE, taken)
    with lock if arguments.should_save else nullcontext():
        return _train(recipe, resume, arguments, why_off)


def _train(
    recipe: Recipe, resume: bool, arguments: SentenceTransformerTrainingArguments, why_off: str | None
) -> dict[str, Any]:
    with arguments.main_process_first(local=False), unsharded_loading(arguments):
        if arguments.should_save:
            require_own_checkpoints(recipe)
            remove_scratch(Path(recipe.output_dir), MODEL_DIRECTORY)
        goes_on = resume and last_checkpoint(recipe) is not None
        prepared = prepare(recipe, anew=not goes_on and arguments.should_save)
        data = load_data(prepared)
        model = load_model(prepared.model, arguments.device, recipe.training.seed)
        # As in force: the environment may switch the plugin off.
        in_force = replace(recipe, fast=replace(recipe.fast, enabled=why_off is None))
        checkpoint, trained_with = open_run_directory(in_force, resume, arguments.should_save, arguments.world_size)
    with plugin_of(recipe.fast):
        state = trained_state(checkpoint)
        if state is None:
            trainer = build_trainer(recipe, model, data.train, arguments)
            state = _run_trainer(trained_with, trainer, checkpoint)
            model = trainer.whole_model()
        else:
            with unsharded_loading(arguments):
                begun, model = model, load_trained(prepared.model, checkpoint, arguments.device)
            kind = kind_of(recipe.model)
            if kind.writes_card:
                trainer = build_trainer(trained_with, model, data.train, arguments, kind.plain_trainer)
                restore_card_metadata(trainer, state, begun)
            del begun
        result = {
            "recipe": recipe.name,
            "fast": asdict(trained_with.fast) | {"why_off": _why_off_in_training(trained_with.fast, why_off)},
            "resumed_from": checkpoint and checkpoint.name,
            "steps": state.global_step,
            "losses": [[entry["step"], entry["loss"]] for entry in state.log_history if "loss" in entry],
            "model": str(Path(recipe.output_dir, MODEL_DIRECTORY)),
        }
        if arguments.should_save:
            # The evaluation may take hours and fail, so save first.
            _save(trained_with, model, result)
            metrics = _evaluate_saved(recipe, prepared, model, data)
            result |= metrics
            _save_metrics(trained_with, model, result, metrics)
    return result


def _why_off_in_training(trained_with: FastSection, why_off: str | None) -> str | None:
    """Why the plugin was off in the training, which an earlier run may have finished."""
    if trained_with.enabled:
        return None
    return why_off or "the model was trained without it before"


def _evaluate_saved(recipe: Recipe, prepared: Recipe, model: HostModel, data: RecipeData) -> dict[str, float | None]:
    """Evaluate, and say where the model is if that fails."""
    directory = Path(recipe.output_dir)
    saved = f"the trained model is in {directory / MODEL_DIRECTORY}, and {directory / RESULT_FILE} has no metrics"
    try:
        return evaluate(prepared, model, data)
    except BaseException as error:
        if is_out_of_memory(error):
            raise RecipeError(
                f"evaluation.batch_size of {recipe.evaluation.batch_size} is more than fits into memory; {saved}."
            ) from error
        logger.warning("The evaluation did not come to its end: %s.", saved)
        raise


def _run_trainer(recipe: Recipe, trainer: Trainer, checkpoint: Path | None) -> TrainerState:
    interrupt = StopOnInterrupt()
    own = (IntervalsOfRecipe(), RefuseUnevenEpochs(), ShuffleByEpoch(), FinishByEpochs(), NameRecipe(recipe))
    for callback in (interrupt, *own):
        trainer.add_callback(callback)
    if recipe.training.log_gradient_concentration is not None:
        trainer.add_callback(kind_of(recipe.model).gradient_logger(recipe, trainer))
    try:
        trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    finally:
        interrupt.restore()
        _close_bar(trainer)
    if interrupt.requested:
        raise KeyboardInterrupt
    require_steps(recipe, trainer.state)
    return trainer.state


def _close_bar(trainer: Trainer) -> None:
    """Close the bar, which the trainer leaves open after an error and would draw once more below the message."""
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, ProgressCallback) and callback.training_bar is not None:
            callback.training_bar.close()


def _save(recipe: Recipe, model: HostModel, result: dict[str, Any]) -> None:
    directory = Path(recipe.output_dir)

    def write(folder: Path) -> None:
        model.save_pretrained(str(folder))
        name_recipe(folder, recipe)
        # Its metrics are those of the earlier model.
        remove_file(directory / RESULT_FILE)

    replace_folder(directory / MODEL_DIRECTORY, write)
    _write_result(recipe, result)


def _save_metrics(recipe: Recipe, model: HostModel, result: dict[str, Any], metrics: dict[str, float | None]) -> None:
    """Add the metrics to the card and to ``train.json``; the weights on disk stay as they are."""
    if kind_of(recipe.model).writes_card:
        add_metrics(recipe, model, metrics)
        with TemporaryDirectory() as scratch:
            model._create_model_card(scratch)
            name_recipe(Path(scratch), recipe)
            replace_file(Path(recipe.output_dir, MODEL_DIRECTORY, CARD), Path(scratch, CARD).read_bytes())
    _write_result(recipe, result)


def _write_result(recipe: Recipe, result: dict[str, Any]) -> None:
    write_json(Path(recipe.output_dir, RESULT_FILE), without_nan(result))
