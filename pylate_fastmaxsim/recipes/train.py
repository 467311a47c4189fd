"""Train the model of a recipe with the Sentence Transformers trainer."""

from __future__ import annotations

import logging
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from pylate import losses, models, utils
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from transformers import ProgressCallback, Trainer, TrainerState, get_scheduler
from transformers.integrations import is_tensorboard_available, is_wandb_available

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations import switch
from pylate_fastmaxsim.recipes.beir import METRICS, evaluate_collection
from pylate_fastmaxsim.recipes.callbacks import ShuffleByEpoch, StepsAsAsked, StopOnInterrupt
from pylate_fastmaxsim.recipes.checkpoints import trained_state
from pylate_fastmaxsim.recipes.contents import MODEL_DIRECTORY
from pylate_fastmaxsim.recipes.data import RecipeData, load_data
from pylate_fastmaxsim.recipes.disk import write_whole_folder
from pylate_fastmaxsim.recipes.epochs import FinishByEpochs, RefuseUnevenEpochs
from pylate_fastmaxsim.recipes.finite_embeddings import NotFiniteError, only_finite
from pylate_fastmaxsim.recipes.finite_json import without_nan, write_json
from pylate_fastmaxsim.recipes.held_out import evaluate_held_out, names_of_metrics
from pylate_fastmaxsim.recipes.lock import only_command
from pylate_fastmaxsim.recipes.memory import is_out_of_memory
from pylate_fastmaxsim.recipes.model import gpu_has_bf16, load_model, load_trained
from pylate_fastmaxsim.recipes.model_card import NameRecipe, name_recipe, retell_training
from pylate_fastmaxsim.recipes.nano_beir import evaluate_nano_beir
from pylate_fastmaxsim.recipes.output import open_output
from pylate_fastmaxsim.recipes.prepare import prepare
from pylate_fastmaxsim.recipes.schema import FastSection, Recipe, RecipeError, first_line
from pylate_fastmaxsim.recipes.sharded import RecipeTrainer, loaded_whole, require_reduced_once

if TYPE_CHECKING:
    from pylate_fastmaxsim.recipes.visual import VisualRetriever

logger = logging.getLogger(__name__)

LOSSES = {
    "contrastive": losses.Contrastive,
    "cached_contrastive": losses.CachedContrastive,
    "distillation": losses.Distillation,
}
REPORTERS = {"tensorboard": is_tensorboard_available, "wandb": is_wandb_available}
RESULT_FILE = "train.json"
LOCK_FILE = "train.lock"


def train(recipe: Recipe, resume: bool = True) -> dict[str, Any]:
    """Train, evaluate and save the model of a recipe.

    Checkpoints, ``train.json`` and the final model (``model/``) go to ``output_dir``; the model is there before it is
    evaluated, and replaces that of an earlier run when it is complete. Under a distributed launcher every process calls
    this; only the main process writes.

    Parameters
    ----------
    recipe
        What to train.
    resume
        Go on from the last complete checkpoint in ``output_dir``; otherwise the checkpoints there
        are removed and the run starts over.

    Returns
    -------
    The content of ``train.json``, which has null for a number that is NaN or infinite: steps, losses, metrics of the
    evaluation, where the model is. Its ``fast`` says what was in force in the training, and ``why_off`` in it why
    the plugin was not.

    Raises
    ------
    RecipeError
        The recipe does not fit its data or this machine, ``output_dir`` holds checkpoints of another recipe or of none, of
        other content of its data or model or of another number of processes, or is written by another command at this
        moment, or its last checkpoint is another one on another machine, no batch could be made, or the evaluation ran out of
        memory.
    KeyboardInterrupt
        The user interrupted the run; a checkpoint holds everything up to the last step, or ``model/`` all of it.
    """
    why_off = plugin_off(recipe.fast)
    arguments = training_arguments(recipe)
    require_trainable(arguments)
    require_reduced_once(recipe, arguments)
    directory = Path(recipe.output_dir)
    taken = (
        f"output_dir: {directory} is being trained in by another command; wait until it ends, or choose another folder."
    )
    only = only_command("output_dir", directory, LOCK_FILE, taken)
    with only if arguments.should_save else nullcontext():
        return _train(recipe, resume, arguments, why_off)


def _train(
    recipe: Recipe, resume: bool, arguments: SentenceTransformerTrainingArguments, why_off: str | None
) -> dict[str, Any]:
    with arguments.main_process_first(local=False), loaded_whole(arguments):
        prepared = prepare(recipe)
        data = load_data(prepared)
        model = load_model(prepared.model, arguments.device, recipe.training.seed)
        # What is in force, which the environment may have a say in.
        in_force = replace(recipe, fast=replace(recipe.fast, enabled=why_off is None))
        checkpoint, trained_with = open_output(in_force, resume, arguments.should_save, arguments.world_size)
    require_same_checkpoint(recipe, checkpoint)
    with switched(recipe.fast):
        state = trained_state(checkpoint)
        if state is None:
            trainer = build_trainer(recipe, model, data.train, arguments)
            state = _run_trainer(trained_with, trainer, checkpoint)
            model = trainer.whole_model()
        else:
            with loaded_whole(arguments):
                begun, model = model, load_trained(prepared.model, checkpoint, arguments.device)
            if not recipe.model.visual:  # whose cards say nothing of the training but the recipe
                trainer = build_trainer(trained_with, model, data.train, arguments, SentenceTransformerTrainer)
                retell_training(trainer, state, begun)
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
            # Before the evaluation, which may take hours, fail or be interrupted: without checkpoints this is all there is.
            _save(trained_with, model, result)
            result |= _evaluate_saved(recipe, prepared, model, data)
            _save_metrics(trained_with, model, result)
    return result


def _why_off_in_training(trained_with: FastSection, why_off: str | None) -> str | None:
    """Why the plugin was off in the training, of which an earlier run may have taken the last step."""
    if trained_with.enabled:
        return None
    return why_off or "the model was trained without it before"


def require_same_checkpoint(recipe: Recipe, checkpoint: Path | None) -> None:
    """Refuse processes that would go on from different steps, and then wait for each other for ever.

    Raises
    ------
    RecipeError
        The processes of a launcher see different checkpoints in ``output_dir``.
    """
    seen = gather_object([checkpoint and checkpoint.name])
    if len(set(seen)) > 1:
        raise RecipeError(
            f"output_dir: {recipe.output_dir} must be on a disk that all machines share, but the last checkpoint there is "
            f"{' or '.join(sorted({name or 'none' for name in seen}))}; share it, or start over with --no-resume."
        )


def _evaluate_saved(
    recipe: Recipe, prepared: Recipe, model: models.ColBERT | VisualRetriever, data: RecipeData
) -> dict[str, float | None]:
    """Evaluate, and say where the model is if that does not come to its end."""
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
    own = (StepsAsAsked(), RefuseUnevenEpochs(), ShuffleByEpoch(), FinishByEpochs(), NameRecipe(recipe))
    for callback in (interrupt, *own):
        trainer.add_callback(callback)
    try:
        trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    finally:
        interrupt.restore()
        _close_bar(trainer)
    if interrupt.requested:
        raise KeyboardInterrupt
    require_steps(recipe, trainer.state)
    return trainer.state


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


def _close_bar(trainer: Trainer) -> None:
    """The trainer leaves its bar open after an error, to be drawn once more below whatever is said about that."""
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, ProgressCallback) and callback.training_bar is not None:
            callback.training_bar.close()


def training_arguments(recipe: Recipe, **overrides: Any) -> SentenceTransformerTrainingArguments:
    """The trainer's arguments for a recipe; ``overrides`` are arguments under the trainer's own names.

    Raises
    ------
    RecipeError
        The trainer does not take them, or the GPU has no bf16.
    """
    options = asdict(recipe.training)
    if options["lr_scheduler_type"] == "reduce_lr_on_plateau":
        raise RecipeError(
            "training.lr_scheduler_type must not be reduce_lr_on_plateau, which needs evaluations during the training; a "
            "recipe has one at its end."
        )
    del options["precision"]
    save_steps = options.pop("save_steps")
    on_gpu = torch.cuda.is_available() and not recipe.training.use_cpu
    precision = _precision(recipe, on_gpu)
    if options["report_to"] == "auto":
        options["report_to"] = [name for name, is_available in REPORTERS.items() if is_available()]
    if recipe.model.visual:
        # Images are turned into inputs by the collator; with adapters the inputs of a layer need no gradient.
        options["remove_unused_columns"] = False
        options["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    try:
        arguments = SentenceTransformerTrainingArguments(
            **{
                **options,
                "output_dir": recipe.output_dir,
                "run_name": recipe.name,
                "max_steps": recipe.training.max_steps or -1,
                "bf16": precision == "bf16",
                "fp16": precision == "fp16",
                "save_strategy": "no" if save_steps is None else "steps",
                "save_steps": save_steps or 500,
                "logging_first_step": True,
                # A diverged run must show; the filter would also wait for the device in every step.
                "logging_nan_inf_filter": False,
                "dataloader_pin_memory": on_gpu,
                "disable_tqdm": False,
                **overrides,
            }
        )
    except ValueError as error:  # a scheduler or an optimizer that it does not know, a device that cannot do this
        raise RecipeError(f"training: {first_line(error)}") from error
    if arguments.n_gpu > 1:
        # More GPUs are for `accelerate launch`, one process each, not for threads of one process.
        arguments._n_gpu = 1
    if arguments.device.type == "cpu" and arguments.device.index is not None:
        # accelerate numbers the CPU for several processes, and torch.load, which resuming needs, knows no such device.
        arguments._setup_devices = torch.device("cpu")
    return arguments


def require_trainable(arguments: SentenceTransformerTrainingArguments) -> None:
    """Refuse what the trainer itself refuses only when it has the model and begins to train.

    Raises
    ------
    RecipeError
        An optimizer, a schedule or a reporting tool needs a package that is not installed, or a value that a recipe
        does not have.
    """
    for name in arguments.report_to:
        if not REPORTERS[name]():
            raise RecipeError(f"training.report_to must be auto or none here, because {name} is not installed.")
    try:
        Trainer.get_optimizer_cls_and_kwargs(arguments, torch.nn.Identity())
    except (ImportError, ValueError) as error:
        raise RecipeError(f"training.optim {arguments.optim.value} cannot be used here: {first_line(error)}") from error
    weights = torch.optim.SGD([torch.zeros(1)], lr=arguments.learning_rate)
    try:
        get_scheduler(arguments.lr_scheduler_type, weights, arguments.warmup_steps, num_training_steps=1)
    except (TypeError, ValueError) as error:
        raise RecipeError(
            f"training.lr_scheduler_type {arguments.lr_scheduler_type.value} cannot be used here: {first_line(error)}"
        ) from error


def _precision(recipe: Recipe, on_gpu: bool) -> str:
    """What ``training.precision`` means on this machine."""
    has_bf16 = on_gpu and gpu_has_bf16()
    if recipe.model.dtype == "bfloat16" and on_gpu and not has_bf16:
        raise RecipeError(
            f"model.dtype must be auto or float32 here, because the GPU ({torch.cuda.get_device_name()}) has no bf16."
        )
    wanted = recipe.training.precision
    if wanted == "auto":
        return ("bf16" if has_bf16 else "fp16") if on_gpu else "fp32"
    if wanted == "bf16" and on_gpu and not has_bf16:
        raise RecipeError(
            f"training.precision must be auto, fp16 or fp32 here, because the GPU ({torch.cuda.get_device_name()}) "
            "has no bf16."
        )
    return wanted


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
        from pylate_fastmaxsim.recipes.visual import build_page_trainer

        return build_page_trainer(recipe.loss.name, options, model, rows, arguments, trainer_class)
    return (trainer_class or RecipeTrainer)(
        model=model,
        args=arguments,
        train_dataset=rows,
        loss=LOSSES[recipe.loss.name](model=model, **options),
        data_collator=utils.ColBERTCollator(tokenize_fn=model.tokenize),
    )


def plugin_off(fast: FastSection) -> str | None:
    """Why :func:`switched` leaves the plugin off, or None where it switches it on.

    Raises
    ------
    RecipeError
        The environment variable ``PYLATE_FASTMAXSIM`` says neither on nor off.
    """
    if not fast.enabled:
        return "fast.enabled is false"
    try:
        forbidden = switch.forbidden()
    except ValueError as error:
        raise RecipeError(str(error)) from None
    return f"PYLATE_FASTMAXSIM={os.environ['PYLATE_FASTMAXSIM']}" if forbidden else None


def switched(fast: FastSection) -> AbstractContextManager:
    """The plugin with the recipe's options, on or off, for the length of a ``with`` block."""
    options = asdict(fast)
    return pylate_fastmaxsim.enabled(**options) if options.pop("enabled") else nullcontext()


def evaluate(recipe: Recipe, model: models.ColBERT | VisualRetriever, data: RecipeData) -> dict[str, float | None]:
    """The metrics of the recipe's evaluation by name; nDCG@10 is None where it has none.

    All are None where the model's embeddings are not finite: an order of such scores is arbitrary, and the metrics of it
    look like any others.
    """
    try:
        with nullcontext() if recipe.model.visual else only_finite(model):
            return _evaluate(recipe, model, data)
    except NotFiniteError:
        logger.warning(
            "The evaluation has no metrics: embeddings of the model are NaN or infinite, as after a training that diverged."
        )
    if recipe.model.visual:
        return {"ndcg@10": None}
    return dict.fromkeys(METRICS if data.held_out is None else names_of_metrics(recipe, data.held_out))


def _evaluate(recipe: Recipe, model: models.ColBERT | VisualRetriever, data: RecipeData) -> dict[str, float | None]:
    if data.collection is not None:
        return evaluate_collection(model, data.collection, recipe.evaluation.batch_size)
    if data.nano_beir is not None:
        return evaluate_nano_beir(model, data.nano_beir)
    if data.held_out is None:
        return {"ndcg@10": None}
    if recipe.model.visual:
        from pylate_fastmaxsim.recipes.visual import evaluate_pages

        return evaluate_pages(model, data.held_out, recipe.evaluation.batch_size)
    return evaluate_held_out(recipe, model, data.held_out)


def _save(recipe: Recipe, model: models.ColBERT | VisualRetriever, result: dict[str, Any]) -> None:
    directory = Path(recipe.output_dir)

    def write(folder: Path) -> None:
        model.save_pretrained(str(folder))
        name_recipe(folder, recipe)
        # Its metrics would be those of another model.
        (directory / RESULT_FILE).unlink(missing_ok=True)

    write_whole_folder(directory / MODEL_DIRECTORY, write)
    _write_result(recipe, result)


def _save_metrics(recipe: Recipe, model: models.ColBERT | VisualRetriever, result: dict[str, Any]) -> None:
    """Bring what the evaluation adds into the card and ``train.json``; the weights on disk stay untouched."""
    if not recipe.model.visual:  # evaluators of pages write nothing into a card
        directory = Path(recipe.output_dir, MODEL_DIRECTORY)
        model._create_model_card(str(directory))
        name_recipe(directory, recipe)
    _write_result(recipe, result)


def _write_result(recipe: Recipe, result: dict[str, Any]) -> None:
    write_json(Path(recipe.output_dir, RESULT_FILE), without_nan(result))
