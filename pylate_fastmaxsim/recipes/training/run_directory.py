"""Ready ``output_dir`` for a training run, which goes on from checkpoints there where they are of the same training."""

from __future__ import annotations

import logging
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pylate_fastmaxsim.recipes.config.dump import dump_recipe
from pylate_fastmaxsim.recipes.config.parse import build, with_defaults
from pylate_fastmaxsim.recipes.config.schema import Recipe
from pylate_fastmaxsim.recipes.data.mined import mined_digest
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.files.records import (
    FILES_FILE,
    MINED_FILE,
    PROCESSES_FILE,
    RECIPE_FILE,
    read_record,
    write_record,
)
from pylate_fastmaxsim.recipes.files.write import make_directory, write_whole_text
from pylate_fastmaxsim.recipes.training.checkpoints import (
    checkpoints_in,
    is_complete,
    last_checkpoint,
    remove_checkpoints,
    trained_state,
)
from pylate_fastmaxsim.recipes.training.fingerprint import MODEL_KEY, data_contents, data_key, model_contents

logger = logging.getLogger(__name__)

# What a run may change when it goes on from a checkpoint: what it writes and is evaluated on, its time, its memory, its
# rounding and the random numbers of dropout. fast.enabled without fast.stock_masking also changes which masked tokens
# win, and a line of log says so.
FREE_TO_CHANGE = {
    "name",
    "output_dir",  # the same folder under another name, or moved: its checkpoints are what is there
    "training.logging_steps",
    "training.save_steps",
    "training.save_total_limit",
    "training.report_to",
    "training.gradient_checkpointing",
    "training.dataloader_num_workers",
    "evaluation.batch_size",
    "evaluation.beir",
    "evaluation.nano_beir",
    "evaluation.split",
    "loss.mini_batch_size",
    "loss.score_mini_batch_size",
    "fast.enabled",
    "fast.padding_free",
    "fast.compile",
    "fast.ring",
    "fast.fused_head",
    "mining.batch_size",
    "mining.documents_per_part",
    "mining.rows_per_part",
}


def open_output(recipe: Recipe, resume: bool, writes: bool, processes: int) -> tuple[Path | None, Recipe]:
    """Ready ``output_dir`` for this run of so many processes.

    Returns
    -------
    The checkpoint to go on from, and the recipe that the model is trained with: where no step is left, as it was
    trained.
    """
    directory = Path(recipe.output_dir)
    _require_model_elsewhere(recipe)
    _require_recorded(directory, writes)
    checkpoint = last_checkpoint(recipe) if resume else None

    def earlier(name: str) -> dict[str, Any]:
        """What a record says of the checkpoint to go on from."""
        return read_record(directory / name) if checkpoint else {}

    if before := earlier(RECIPE_FILE):
        _require_same_run(recipe, before)
        if writes:  # in one process of several
            _say_what_masking_changes(recipe, before)
    digest, mined = mined_digest(recipe.data), earlier(MINED_FILE)
    if mined and mined.get("digest") != digest:
        raise RecipeError(
            f"data.name: {recipe.data.name} was mined anew after the checkpoints in {recipe.output_dir} were made; "
            "choose another output_dir, or start over with --no-resume."
        )
    known, data, model = earlier(FILES_FILE), data_contents(recipe), model_contents(recipe)
    _require_same_content(recipe, data_key(recipe), data, known)
    _require_same_content(recipe, MODEL_KEY, model, known)
    launched = {"processes": processes} | earlier(PROCESSES_FILE)
    is_trained = trained_state(checkpoint) is not None
    trained_with = _as_it_was_trained(recipe, before) if is_trained else recipe
    # What has only to be evaluated takes no more steps, which depend on how the rows are divided.
    if launched["processes"] != processes and not is_trained:
        raise RecipeError(
            f"the number of processes is {processes}, but the checkpoints in {recipe.output_dir} were made with "
            f"{launched['processes']}; keep it, choose another output_dir, or start over with --no-resume."
        )
    if writes:
        make_directory("output_dir", directory)
        if not resume:
            remove_checkpoints(directory)
        write_whole_text(directory / RECIPE_FILE, dump_recipe(trained_with))
        write_record(directory / MINED_FILE, {"digest": digest} if digest is not None else {})
        write_record(directory / FILES_FILE, data | model)
        write_record(directory / PROCESSES_FILE, launched)
    return checkpoint, trained_with


def _require_model_elsewhere(recipe: Recipe) -> None:
    """Raise where the model to begin with is a checkpoint that this run would remove or replace."""
    name = recipe.model.name_or_path
    if name is None:
        return
    model = Path(name).resolve()
    for checkpoint in map(Path.resolve, checkpoints_in(Path(recipe.output_dir))):
        if checkpoint == model or checkpoint in model.parents:
            raise RecipeError(
                f"{MODEL_KEY}: {name} is one of the checkpoints in output_dir, which this run replaces; copy it to another "
                "folder, or choose another output_dir."
            )


def _require_recorded(directory: Path, writes: bool) -> None:
    """Raise where checkpoints are not known to be a recipe's: they would be gone on from, replaced or removed.

    A process that does not write removes none, and where machines share no disk, it has its own parts of checkpoints
    only, of which there is no record.
    """
    checkpoints = {path: step for path, step in checkpoints_in(directory).items() if writes or is_complete(path)}
    if checkpoints and not (directory / RECIPE_FILE).exists():
        newest = max(checkpoints, key=checkpoints.get)
        raise RecipeError(
            f"output_dir: {directory} holds {newest.name}, but no {RECIPE_FILE} that says of which recipe its checkpoints "
            "are; choose another output_dir, move them away, or, if a recipe made them, copy it from their README.md into "
            "that file."
        )


def _require_same_run(recipe: Recipe, earlier: dict[str, Any]) -> None:
    before, now = _flat(with_defaults(earlier, Recipe)), _flat(asdict(recipe))
    for key in sorted(before.keys() | now.keys()):
        if key not in FREE_TO_CHANGE and before.get(key) != now.get(key):
            raise RecipeError(
                f"{key} is {now.get(key)!r}, but the checkpoints in {recipe.output_dir} were made with "
                f"{before.get(key)!r}; keep it, choose another output_dir, or start over with --no-resume."
            )


def _require_same_content(recipe: Recipe, key: str, contents: dict[str, Any], known: dict[str, Any]) -> None:
    changed = [name for name in contents if name in known and contents[name]["digest"] != known[name]["digest"]]
    if changed:
        raise RecipeError(
            f"{key}: {', '.join(changed)} changed after the checkpoints in {recipe.output_dir} were made; bring the "
            "earlier content back, choose another output_dir, or start over with --no-resume."
        )


def _as_it_was_trained(recipe: Recipe, earlier: dict[str, Any]) -> Recipe:
    """The recipe of a training that is over, under the name and with the evaluation of now."""
    trained = build(Recipe, with_defaults(earlier, Recipe), "")
    return replace(trained, name=recipe.name, output_dir=recipe.output_dir, evaluation=recipe.evaluation)


def _say_what_masking_changes(recipe: Recipe, earlier: dict[str, Any]) -> None:
    before = with_defaults(earlier, Recipe)["fast"]["enabled"]
    if recipe.fast.enabled != before and not recipe.fast.stock_masking and not recipe.model.visual:
        logger.warning(
            "pylate-fastmaxsim is %s, but the checkpoints in %s were made with it %s: stock PyLate lets masked document "
            "tokens win and this package does not, so that scores differ from here on.",
            *("on" if recipe.fast.enabled else "off", recipe.output_dir, "on" if before else "off"),
        )


def _flat(section: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for name, value in section.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
