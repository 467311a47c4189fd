"""The folder of a training run: which checkpoints it has, and of which recipe and data they are."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from transformers import TrainerState

from pylate_fastmaxsim.recipes.checks import SOURCE_KEYS
from pylate_fastmaxsim.recipes.digest import RECIPE_FILE, content_digest, model_files
from pylate_fastmaxsim.recipes.disk import make_directory, write_whole_text
from pylate_fastmaxsim.recipes.distillation import COLUMNS
from pylate_fastmaxsim.recipes.docstrings import source_files
from pylate_fastmaxsim.recipes.finite_json import write_json
from pylate_fastmaxsim.recipes.load import dump_recipe
from pylate_fastmaxsim.recipes.mined import mined_digest
from pylate_fastmaxsim.recipes.schema import DataSection, Recipe, RecipeError
from pylate_fastmaxsim.recipes.sections import build, with_defaults
from pylate_fastmaxsim.recipes.tables import subset_files, table_files

logger = logging.getLogger(__name__)

MINED_FILE = "mined.json"  # beside it, of which mined data the checkpoints are
FILES_FILE = "files.json"  # likewise, of what content of data and model on this machine
PROCESSES_FILE = "processes.json"  # likewise, of how many processes, among which rows are divided

MODEL_DIRECTORY = "model"  # also in the folder of a run, what it trained

MODEL_KEY = "model.name_or_path"

# The trainer writes this file last, so a checkpoint that has it is complete.
CHECKPOINT_LAST_FILE = "trainer_state.json"

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


def last_checkpoint(recipe: Recipe) -> Path | None:
    """The newest complete checkpoint of a recipe; one that an interruption cut short does not count."""
    steps = _checkpoints(Path(recipe.output_dir))
    return next(filter(_is_complete, sorted(steps, key=steps.get, reverse=True)), None)


def _is_complete(checkpoint: Path) -> bool:
    """Whether the file that is written last is there to its end, which it is not where the disk was full by then."""
    file = checkpoint / CHECKPOINT_LAST_FILE
    try:
        return file.exists() and isinstance(json.loads(file.read_text(encoding="utf-8")), dict)
    except ValueError:
        return False


def _checkpoints(directory: Path) -> dict[Path, int]:
    """The checkpoints of the trainer and their steps; what users put beside them under longer names is theirs."""
    names = {path: re.fullmatch(r"checkpoint-([0-9]+)", path.name) for path in directory.glob("checkpoint-*")}
    return {path: int(name[1]) for path, name in names.items() if name and path.is_dir()}


def trained_state(checkpoint: Path | None) -> TrainerState | None:
    """The state of a checkpoint with no step left to do, from which the trainer would do one step more."""
    if checkpoint is None:
        return None
    state = TrainerState.load_from_json(str(checkpoint / CHECKPOINT_LAST_FILE))
    return state if state.global_step >= state.max_steps else None


def open_output(recipe: Recipe, resume: bool, writes: bool, processes: int) -> tuple[Path | None, Recipe]:
    """Ready ``output_dir`` for this run of so many processes.

    Returns
    -------
    The checkpoint to go on from, and the recipe that the model is trained with: where no step is left, as it was trained.
    """
    directory = Path(recipe.output_dir)
    _require_model_elsewhere(recipe)
    _require_recorded(directory, writes)
    checkpoint = last_checkpoint(recipe) if resume else None

    def earlier(name: str) -> dict[str, Any]:
        """What a record says of the checkpoint to go on from."""
        return (checkpoint and _read_record(directory / name)) or {}

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
    known, data, model = earlier(FILES_FILE), data_contents(recipe), _model_contents(recipe)
    for key, contents in {_data_key(recipe): data, MODEL_KEY: model}.items():
        changed = [name for name in contents if name in known and contents[name]["digest"] != known[name]["digest"]]
        if changed:
            raise RecipeError(
                f"{key}: {', '.join(changed)} changed after the checkpoints in {recipe.output_dir} were made; bring the "
                "earlier content back, choose another output_dir, or start over with --no-resume."
            )
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
            checkpoints = _checkpoints(directory)
            # First what tells a whole checkpoint: what an interruption leaves of one must not be gone on from.
            for path in checkpoints:
                (path / CHECKPOINT_LAST_FILE).unlink(missing_ok=True)
            for path in checkpoints:
                shutil.rmtree(path)
        write_whole_text(directory / RECIPE_FILE, dump_recipe(trained_with))
        _write_record(directory / MINED_FILE, {"digest": digest} if digest is not None else {})
        _write_record(directory / FILES_FILE, data | model)
        _write_record(directory / PROCESSES_FILE, launched)
    return checkpoint, trained_with


def _require_model_elsewhere(recipe: Recipe) -> None:
    """Raise where the model to begin with is a checkpoint that this run would remove or replace."""
    name = recipe.model.name_or_path
    if name is None:
        return
    model = Path(name).resolve()
    for checkpoint in map(Path.resolve, _checkpoints(Path(recipe.output_dir))):
        if checkpoint == model or checkpoint in model.parents:
            raise RecipeError(
                f"{MODEL_KEY}: {name} is one of the checkpoints in output_dir, which this run replaces; copy it to another "
                "folder, or choose another output_dir."
            )


def _require_recorded(directory: Path, writes: bool) -> None:
    """Raise where checkpoints are not known to be a recipe's: they would be gone on from, replaced or removed.

    A process that does not write removes none, and where machines share no disk, it has its own parts of checkpoints only,
    of which there is no record.
    """
    checkpoints = {path: step for path, step in _checkpoints(directory).items() if writes or _is_complete(path)}
    if checkpoints and not (directory / RECIPE_FILE).exists():
        newest = max(checkpoints, key=checkpoints.get)
        raise RecipeError(
            f"output_dir: {directory} holds {newest.name}, but no {RECIPE_FILE} that says of which recipe its checkpoints "
            "are; choose another output_dir, move them away, or, if a recipe made them, copy it from their README.md into "
            "that file."
        )


def data_contents(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """What tells each of ``data.files`` or ``data.packages``, or the folder ``data.name``, from another of its name.

    A file with the size and times that it had when ``output_dir`` was last written is not read again. Data on the Hub has
    no digest.
    """
    data = recipe.data
    if data.source == "docstrings":
        return {name: {"digest": content_digest("data.packages", source_files(name))} for name in data.packages}
    names = data.files
    if data.source != "files":
        names = [data.name] if Path(data.name).is_dir() else []
    return _contents(recipe, _data_key(recipe), names, partial(_data_files, data))


def _data_key(recipe: Recipe) -> str:
    return f"data.{SOURCE_KEYS[recipe.data.source][0]}"


def _model_contents(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """The same of a model in a folder, which may have been trained again since; nothing of one on the Hub.

    Nor of the model that this run replaces when it ends.
    """
    name = recipe.model.name_or_path
    is_kept = name is not None and Path(name).resolve() != Path(recipe.output_dir, MODEL_DIRECTORY).resolve()
    names = [name] if is_kept and Path(name).is_dir() else []
    return _contents(recipe, MODEL_KEY, names, partial(_model_files, Path(recipe.output_dir).resolve()))


def _contents(
    recipe: Recipe, key: str, names: list[str], files_in: Callable[[Path], Iterable[str | Path]]
) -> dict[str, dict[str, Any]]:
    try:
        earlier = _read_record(Path(recipe.output_dir, FILES_FILE)) or {}
    except RecipeError:
        earlier = {}  # which saves time only
    contents = {}
    for name in names:
        known, path = earlier.get(name, {}), Path(name)
        if path.is_dir():
            path = path.resolve()
            contents[name] = _folder_content(key, path, files_in(path), known)
        else:
            contents[name] = _file_content(key, path, known)
    return contents


def _data_files(data: DataSection, folder: Path) -> list[str]:
    """The files that are loaded of the folder ``data.name``; none where loading fails, which says why itself."""
    name, split = str(folder), data.split or "train"
    with suppress(Exception):
        if data.source == "hub":
            return table_files(name, data.config, split)
        return [file for subset in sorted(COLUMNS) for file in subset_files(name, subset, split)]
    return []


def _model_files(output: Path, folder: Path) -> list[Path]:
    """The files in the folder of a model, and none in this run's inside of it, which may have no record yet."""
    return [file for file in model_files(folder) if folder not in output.parents or output not in file.parents]


def _folder_content(key: str, folder: Path, files: Iterable[str | Path], known: dict[str, Any]) -> dict[str, Any]:
    known, contents = known.get("files", {}), {}
    for file in filter(os.path.isfile, files):
        name = os.path.relpath(file, folder)
        contents[name] = _file_content(key, Path(file), known.get(name, {}))
    digests = {name: content["digest"] for name, content in contents.items()}
    return {"files": contents, "digest": hashlib.sha256(json.dumps(digests).encode()).hexdigest()}


def _file_content(key: str, file: Path, known: dict[str, Any]) -> dict[str, Any]:
    status = os.stat(file)
    # The third because the second may be kept, or be the same for all files, and the first is often the same.
    kept = {"size": status.st_size, "modified": status.st_mtime_ns, "changed": status.st_ctime_ns}
    same = all(known.get(name) == value for name, value in kept.items())
    # The content decides: a copy that is made anew for each job has another time and the same rows.
    return kept | {"digest": known["digest"] if same else content_digest(key, [file])}


def _write_record(file: Path, values: dict[str, Any]) -> None:
    """Of nothing there is no record."""
    if values:
        write_json(file, values)
    else:
        file.unlink(missing_ok=True)


def _read_record(file: Path) -> dict[str, Any] | None:
    """What was written of the checkpoints beside it, or None where nothing was."""
    if not file.exists():
        return None
    try:
        text = file.read_text(encoding="utf-8")
        values = yaml.safe_load(text) if file.suffix == ".yaml" else json.loads(text)
    except (ValueError, yaml.YAMLError):
        values = None
    if not isinstance(values, dict):
        # Without the recipe nobody knows whose the checkpoints are; each has it in its card.
        go_on = "move it away to go on without it"
        if file.name == RECIPE_FILE:
            go_on = "write into it the recipe that stands in their README.md to go on"
        raise RecipeError(
            f"output_dir: {file} says what the checkpoints beside it were made of, but cannot be read; {go_on}, choose "
            "another output_dir, or start over with --no-resume."
        )
    return values


def _require_same_run(recipe: Recipe, earlier: dict[str, Any]) -> None:
    before, now = _flat(with_defaults(earlier, Recipe)), _flat(asdict(recipe))
    for key in sorted(before.keys() | now.keys()):
        if key not in FREE_TO_CHANGE and before.get(key) != now.get(key):
            raise RecipeError(
                f"{key} is {now.get(key)!r}, but the checkpoints in {recipe.output_dir} were made with "
                f"{before.get(key)!r}; keep it, choose another output_dir, or start over with --no-resume."
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
