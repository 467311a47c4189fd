"""The folder of a training run: its checkpoints, of which recipe they are, and whether a run goes on from them."""

import logging
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from pylate_fastmaxsim.files.replace import remove_file, replace_file
from pylate_fastmaxsim.integrations.log import log_once
from pylate_fastmaxsim.recipes.config.kinds import build_recipe
from pylate_fastmaxsim.recipes.config.schema import Recipe, TrainingSection
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.files import make_directory
from pylate_fastmaxsim.recipes.load import dump_recipe, plain_values, read_yaml
from pylate_fastmaxsim.recipes.models.load import is_cut_short
from pylate_fastmaxsim.recipes.trainers.callbacks import FinishByEpochs

logger = logging.getLogger(__name__)

RECIPE_FILE = "recipe-of-checkpoints.yaml"
MODEL_DIRECTORY = "model"

# Keys that may differ when a run goes on from a checkpoint. They change what is written or evaluated, time, memory,
# rounding and the random numbers of dropout. fast.enabled also changes masking, see _warn_of_other_masking.
FREE_TO_CHANGE = {
    "name",
    "output_dir",  # a folder that was moved or renamed
    *(f"training.logging_{name}" for name in ("steps", "strategy", "first_step")),
    *(f"training.save_{name}" for name in ("steps", "strategy", "total_limit")),
    *(f"training.eval_{name}" for name in ("steps", "strategy", "delay", "on_start")),
    *(f"training.hub_{name}" for name in ("model_id", "private_repo", "revision")),
    *(f"training.{name}" for name in ("report_to", "run_name", "project", "disable_tqdm", "push_to_hub")),
    "training.early_stopping_patience",
    "training.log_gradient_concentration",
    "training.gradient_checkpointing",
    "training.dataloader_num_workers",
    "evaluation.batch_size",
    "evaluation.beir",
    "evaluation.nano_beir",
    "evaluation.split",
    "loss.mini_batch_size",
    "loss.mini_batch_num_tokens",
    "loss.score_mini_batch_size",
    "fast.enabled",
    "fast.padding_free",
    "fast.compile",
    "mining.batch_size",
    "mining.documents_per_part",
    "mining.rows_per_part",
}
# Keys of which a run that goes on may have more.
LENGTHS = ("max_steps", "num_train_epochs")


def open_run_directory(
    recipe: Recipe, checkpoint: Path | None, resume: bool, writes: bool, processes: int
) -> tuple[Recipe, TrainerState | None]:
    """Record the recipe of this run of ``processes`` processes, which goes on from a checkpoint.

    Returns
    -------
    The recipe that the model is trained with, and the state of a checkpoint that has no step left to do. Then that is the
    recorded recipe with the name and the evaluation of now, and what is pushed to the Hub.
    """
    directory = Path(recipe.output_dir)
    record = directory / RECIPE_FILE
    trained_with, state = recipe, None
    if checkpoint is not None:
        earlier = build_recipe(read_yaml(record))
        longer = is_longer(lengths_of(recipe.training), lengths_of(earlier.training))
        _require_same_recipe(recipe, earlier, longer)
        if writes:  # one process of several
            _warn_of_other_masking(recipe, earlier)
            if longer:
                logger.warning(
                    "The run in %s is longer than it was begun for: from here on its learning rate follows the longer schedule.",
                    recipe.output_dir,
                )
        state = trained_state(checkpoint, recipe.training)
        if state is None or processes > 1:  # one process is enough to evaluate
            _require_same_processes(checkpoint, processes)
        if state is not None:
            trained_with = replace(
                earlier, name=recipe.name, output_dir=recipe.output_dir, evaluation=recipe.evaluation
            )
    if writes:
        make_directory("output_dir", directory)
        if not resume:
            remove_checkpoints(directory)
        replace_file(record, dump_recipe(trained_with).encode())
    return trained_with, state


def require_own_checkpoints(directory: Path, inputs: Sequence[Path]) -> None:
    """Refuse checkpoints that may be of another recipe, and to remove or replace the inputs of the recipe."""
    if checkpoints_in(directory) and not (directory / RECIPE_FILE).exists():
        raise RecipeError(
            f"output_dir: {directory} has checkpoints but no {RECIPE_FILE}, so they may be of another recipe; move them "
            "away or choose another output_dir."
        )
    for folder in (directory / MODEL_DIRECTORY, *checkpoints_in(directory)):
        for path in inputs:
            if path.resolve().is_relative_to(folder.resolve()):
                raise RecipeError(
                    f"{path} lies in output_dir, where this training replaces it; choose another output_dir."
                )
    model = directory / MODEL_DIRECTORY
    if model.is_symlink() or (model.exists() and not model.is_dir()):
        raise RecipeError(f"output_dir: {model} must be a folder, or not be there, to be replaced.")


def is_longer(now: dict[str, float | None], before: dict[str, float | None]) -> bool:
    """Whether ``max_steps``, or without them ``num_train_epochs``, are more than before; False if these are not comparable."""
    steps = [each["max_steps"] for each in (now, before)]
    if None in steps:
        return steps == [None, None] and now["num_train_epochs"] > before["num_train_epochs"]
    return steps[0] > steps[1]


def lengths_of(training: TrainingSection) -> dict[str, float | None]:
    """The keys that say how long a training is."""
    return {name: getattr(training, name) for name in LENGTHS}


def _require_same_recipe(recipe: Recipe, earlier: Recipe, longer: bool) -> None:
    before, now = _flatten(plain_values(earlier)), _flatten(plain_values(recipe))
    free = set(FREE_TO_CHANGE)
    if longer:
        free |= {f"training.{name}" for name in LENGTHS}
    changed = [
        f"{key} is {now.get(key)!r} and was {before.get(key)!r}"
        for key in sorted(before.keys() | now.keys())
        if key not in free and not key.startswith("evaluation.data") and before.get(key) != now.get(key)
    ]
    if changed:
        raise RecipeError(
            f"{', '.join(changed)} in the recipe of the checkpoints in {recipe.output_dir}; keep that, choose another "
            "output_dir, or start over with --no-resume."
        )


def _require_same_processes(checkpoint: Path, processes: int) -> None:
    """Refuse another number of processes: batches that are done would be counted wrong.

    On machines without a shared disk a checkpoint has the random states of one machine's processes only.
    """
    saved = len(list(checkpoint.glob("rng_state*.pth")))
    if saved != processes:
        raise RecipeError(
            f"output_dir: {checkpoint} has the random states of {saved} processes, and this run has {processes}; start as "
            "many, all with the same disk, choose another output_dir, or start over with --no-resume."
        )


def _warn_of_other_masking(recipe: Recipe, earlier: Recipe) -> None:
    before = earlier.fast.enabled
    pooled = recipe.loss.pooling is not None  # masked tokens are left out with and without the plugin
    if recipe.fast.enabled != before and not (recipe.fast.stock_masking or recipe.model.kind != "colbert" or pooled):
        logger.warning(
            "pylate-fastmaxsim is %s, but the checkpoints in %s were made with it %s: stock PyLate lets masked document "
            "tokens win and this package does not, so scores differ from here on.",
            *("on" if recipe.fast.enabled else "off", recipe.output_dir, "on" if before else "off"),
        )


def _flatten(section: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for name, value in section.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def last_checkpoint(recipe: Recipe) -> Path | None:
    """The newest complete checkpoint in a recipe's ``output_dir``."""
    steps = checkpoints_in(Path(recipe.output_dir))
    return next(filter(is_complete, sorted(steps, key=steps.get, reverse=True)), None)


def is_complete(checkpoint: Path) -> bool:
    """True if the file that the trainer writes last is there, and no file is cut short, as by a power cut."""
    if not (checkpoint / TRAINER_STATE_NAME).exists():
        return False
    damaged = [path for path in sorted(checkpoint.rglob("*")) if is_cut_short(path)]
    if damaged:
        log_once(
            "%s is damaged, so training does not go on from %s but from the checkpoint before it, if there is one.",
            damaged[0],
            checkpoint,
        )
    return not damaged


def checkpoints_in(directory: Path) -> dict[Path, int]:
    """The trainer's checkpoints and their steps. Other names, such as ``checkpoint-8-best``, are the user's."""
    names = {path: re.fullmatch(r"checkpoint-([0-9]+)", path.name) for path in directory.glob("checkpoint-*")}
    return {path: int(name[1]) for path, name in names.items() if name and path.is_dir()}


def trained_state(checkpoint: Path, now: TrainingSection) -> TrainerState | None:
    """The state of a checkpoint if no step is left to do, else None. The trainer itself would do one step more."""
    state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
    asked = state.stateful_callbacks[FinishByEpochs.__name__]["args"]["asked"]
    return state if state.global_step >= state.max_steps and not is_longer(lengths_of(now), asked) else None


def remove_checkpoints(directory: Path) -> None:
    """Remove all checkpoints. First the file that marks them as complete, in case this is interrupted, even by a power cut."""
    checkpoints = checkpoints_in(directory)
    for path in checkpoints:
        remove_file(path / TRAINER_STATE_NAME)
    for path in checkpoints:
        shutil.rmtree(path)
