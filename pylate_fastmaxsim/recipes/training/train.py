"""Train the model of a recipe with the Sentence Transformers trainer."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformerTrainingArguments
from transformers import ProgressCallback, Trainer, TrainerState

from pylate_fastmaxsim.files.replace import remove_file, remove_scratch, replace_folder, write_json
from pylate_fastmaxsim.recipes.config.schema import Recipe, TrainingSection
from pylate_fastmaxsim.recipes.data.collection import RecipeData
from pylate_fastmaxsim.recipes.errors import RecipeError, within_memory
from pylate_fastmaxsim.recipes.evaluation.evaluate import evaluate, metric_names
from pylate_fastmaxsim.recipes.files import hold_lock, inputs_of, require_output
from pylate_fastmaxsim.recipes.kind import Kind
from pylate_fastmaxsim.recipes.models.load import HostModel, kind_of, load_model, load_trained
from pylate_fastmaxsim.recipes.plugin import plugin_of, reason_against_plugin
from pylate_fastmaxsim.recipes.trainers.callbacks import FinishByEpochs, ResumeExactly, StopEarly, StopOnInterrupt
from pylate_fastmaxsim.recipes.trainers.sharded import is_sharded, unsharded_loading
from pylate_fastmaxsim.recipes.training.arguments import training_arguments
from pylate_fastmaxsim.recipes.training.hub import open_repository, push
from pylate_fastmaxsim.recipes.training.inputs import load_data, prepare
from pylate_fastmaxsim.recipes.training.model_card import NameRecipe, add_metrics, append_recipe, restore_card_metadata
from pylate_fastmaxsim.recipes.training.run_directory import (
    MODEL_DIRECTORY,
    RECIPE_FILE,
    last_checkpoint,
    lengths_of,
    open_run_directory,
    require_own_checkpoints,
)
from pylate_fastmaxsim.recipes.training.summary import Summary, encoding_mode, metrics_before
from pylate_fastmaxsim.reporting.numbers import without_nan

logger = logging.getLogger(__name__)

RESULT_FILE = "train.json"
LOCK_FILE = "train.lock"


def train(
    recipe: Recipe, resume: bool = True, begin: Callable[[dict[str, Any]], object] = lambda summary: None
) -> dict[str, Any]:
    """Train, evaluate and save the model of a recipe, and push it to the Hub with ``training.push_to_hub``.

    Checkpoints, ``train.json`` and the final model (``model/``) go to ``output_dir``. The model is saved before it is
    evaluated, and replaces that of an earlier run when it is complete. Under a distributed launcher every process calls
    this, and only the main process writes.

    Parameters
    ----------
    recipe
        What to train.
    resume
        Go on from the last complete checkpoint in ``output_dir``. Otherwise remove the checkpoints there and start over.
    begin
        Is told what will be trained, before the first step, in the main process.

    Returns
    -------
    The content of ``train.json``: steps, losses, metrics of the evaluation, where the model is. Its ``fast`` has the
    options in force during the training, in ``why_off`` why the plugin was off and in ``mode`` how texts were encoded.
    ``before`` has the metrics before the first step, ``seconds`` and ``rows_per_second`` those of the training in this
    run, without evaluations; None where there was none. The file has null for NaN and infinity.

    Raises
    ------
    RecipeError
        The recipe does not fit its data or this machine. Or ``output_dir`` has checkpoints of another recipe or of
        another number of processes, or another command is training there. Or there was no batch, or the evaluation ran
        out of memory.
    KeyboardInterrupt
        The user interrupted the run. A checkpoint holds everything up to the last step, or ``model/`` the result.
    """
    kind = kind_of(recipe.model)
    why_off = reason_against_plugin(recipe.fast)
    arguments = training_arguments(recipe, kind)
    directory = Path(recipe.output_dir)
    inputs = inputs_of(recipe.model, recipe.data, recipe.evaluation)
    for name in (RESULT_FILE, RECIPE_FILE):
        require_output("output_dir", directory / name, inputs)
    lock = hold_lock("output_dir", directory / LOCK_FILE, f"{directory} is being trained in")
    with lock if arguments.should_save else nullcontext():
        if arguments.should_save:
            require_own_checkpoints(directory, inputs)
            remove_scratch(directory, MODEL_DIRECTORY)
        return _train(recipe, kind, resume, arguments, why_off, begin)


def _train(
    recipe: Recipe,
    kind: Kind,
    resume: bool,
    arguments: SentenceTransformerTrainingArguments,
    why_off: str | None,
    begin: Callable[[dict[str, Any]], object],
) -> dict[str, Any]:
    folder = Path(recipe.output_dir, MODEL_DIRECTORY)
    with arguments.main_process_first(local=False), unsharded_loading(arguments):
        checkpoint = last_checkpoint(recipe) if resume else None
        prepared = prepare(recipe, anew=checkpoint is None and arguments.should_save)
        data = load_data(prepared)
        first = _evaluates_first(recipe, data, arguments)
        model = load_model(prepared.model, arguments.device, recipe.training.seed)
        repository = open_repository(recipe) if arguments.should_save else None
        # As in force: the environment may switch the plugin off.
        in_force = replace(recipe, fast=replace(recipe.fast, enabled=why_off is None))
        trained_with, state = open_run_directory(
            in_force, checkpoint, resume, arguments.should_save, arguments.world_size
        )
    speed: dict[str, float | None] = {"seconds": None, "rows_per_second": None}
    mode = None
    if not trained_with.fast.enabled:  # in the training, which an earlier run may have finished
        why_off = why_off or "the model was trained without it before"
    with plugin_of(recipe.fast):
        if state is None:
            trainer = kind.build_trainer(recipe.loss, model, data.train, arguments)
            trainer.measure = lambda model: _evaluate(
                prepared, model, data, "lower it and start the same command again"
            )
            summary = Summary(trained_with, data, begin, trainer.evaluate if first else None)
            state = _run_trainer(trained_with, kind, trainer, checkpoint, summary)
            speed, mode = summary.speed(trainer), encoding_mode(trainer.model)
            model = trainer.whole_model()
        else:
            best = arguments.load_best_model_at_end and state.best_model_checkpoint
            trained = checkpoint.with_name(Path(best).name) if best else checkpoint
            with unsharded_loading(arguments):
                begun, model = model, load_trained(prepared.model, trained, arguments.device)
            if kind.own_card is None:
                trainer = kind.build_trainer(trained_with.loss, model, data.train, arguments)
                restore_card_metadata(trainer, state, begun)
            del begun
        result = {
            "recipe": recipe.name,
            "fast": asdict(trained_with.fast)
            | {"why_off": None if trained_with.fast.enabled else why_off, "mode": mode},
            "resumed_from": checkpoint and checkpoint.name,
            "steps": state.global_step,
            "losses": [[entry["step"], entry["loss"]] for entry in state.log_history if "loss" in entry],
            **speed,
            "before": metrics_before(state),
            "model": str(folder),
            "pushed_to": None,
        }
        if arguments.should_save:
            # The evaluation may take hours and fail, so save first.
            _save(trained_with, model, folder)
            _write_result(folder, result)
            metrics = _evaluate_saved(prepared, model, data, folder)
            result |= metrics
            if kind.own_card is None:
                add_metrics(trained_with, model, metrics, folder, state)
            _write_result(folder, result)
            if repository is not None:
                result["pushed_to"] = push(recipe, repository, folder)
                _write_result(folder, result)
    return result


def _evaluates_first(recipe: Recipe, data: RecipeData, arguments: SentenceTransformerTrainingArguments) -> bool:
    """Whether to evaluate before the first step: where that takes seconds, or is asked for. Refuses metrics that are not there."""
    sharded = is_sharded(arguments)
    asked = recipe.training.arguments.get("eval_on_start", data.held_out is not None and not sharded)
    if sharded and (asked or arguments.eval_strategy != "no"):
        raise RecipeError(
            "training.eval_strategy must be no under FSDP and DeepSpeed, where no process has the whole model."
        )
    metric, names = arguments.metric_for_best_model, metric_names(recipe, data) if data.is_evaluated else []
    if metric is not None and metric.removeprefix("eval_") not in names:
        raise RecipeError(f"training.metric_for_best_model must be one of {', '.join(names)}, got {metric!r}.")
    return asked


def _evaluate(recipe: Recipe, model: HostModel, data: RecipeData, advice: str) -> dict[str, float | None]:
    """Evaluate; an error that memory is full says what to do or what is kept."""
    with within_memory("evaluation.batch_size", recipe.evaluation.batch_size, advice):
        return evaluate(recipe, model, data)


def _evaluate_saved(recipe: Recipe, model: HostModel, data: RecipeData, folder: Path) -> dict[str, float | None]:
    """Evaluate, and say where the model is if that fails."""
    saved = f"the trained model is in {folder}, and {folder.parent / RESULT_FILE} has no metrics"
    try:
        return _evaluate(recipe, model, data, saved)
    except RecipeError:
        raise
    except BaseException:
        logger.warning("The evaluation did not come to its end: %s.", saved)
        raise


def _run_trainer(
    recipe: Recipe, kind: Kind, trainer: Trainer, checkpoint: Path | None, summary: Summary
) -> TrainerState:
    interrupt, finish = StopOnInterrupt(), FinishByEpochs(lengths_of(recipe.training))
    for callback in (interrupt, ResumeExactly(), finish, NameRecipe(recipe), summary):
        trainer.add_callback(callback)
    if recipe.training.early_stopping_patience is not None:
        trainer.add_callback(StopEarly(recipe.training.early_stopping_patience))
    if recipe.training.log_gradient_concentration is not None:
        trainer.add_callback(kind.gradient_logger(recipe, trainer))
    try:
        trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    finally:
        interrupt.restore()
        for callback in trainer.callback_handler.callbacks:
            # The trainer leaves its bar open after an error, and would draw it once more below the message.
            if isinstance(callback, ProgressCallback) and callback.training_bar is not None:
                callback.training_bar.close()
    if interrupt.requested:
        raise KeyboardInterrupt
    require_steps(recipe.training, trainer.state)
    return trainer.state


def require_steps(section: TrainingSection, state: TrainerState) -> None:
    """Refuse a training without a single batch, of which the trainer only warns."""
    if state.global_step:
        return
    incomplete = " or set training.dataloader_drop_last to false" if section.dataloader_drop_last else ""
    raise RecipeError(
        f"training.per_device_train_batch_size of {section.per_device_train_batch_size} with training.batch_sampler "
        f"{section.batch_sampler} leaves no batch of the rows of data, so that no step was taken; lower it{incomplete}."
    )


def _save(recipe: Recipe, model: HostModel, folder: Path) -> None:
    def write(scratch: Path) -> None:
        model.save_pretrained(str(scratch))
        append_recipe(scratch, recipe)
        # Its metrics are those of the earlier model.
        remove_file(folder.parent / RESULT_FILE)

    replace_folder(folder, write)


def _write_result(folder: Path, result: dict[str, Any]) -> None:
    write_json(folder.parent / RESULT_FILE, without_nan(result))
