"""The folder of a training run: which checkpoints it has, and of which recipe and data they are."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from pylate_fastmaxsim.recipes.digest import content_digest
from pylate_fastmaxsim.recipes.disk import make_directory, write_whole_text
from pylate_fastmaxsim.recipes.docstrings import source_files
from pylate_fastmaxsim.recipes.finite_json import write_json
from pylate_fastmaxsim.recipes.load import dump_recipe, with_defaults
from pylate_fastmaxsim.recipes.mined import mined_digest
from pylate_fastmaxsim.recipes.schema import Recipe, RecipeError

logger = logging.getLogger(__name__)

RECIPE_FILE = "recipe-of-checkpoints.yaml"
MINED_FILE = "mined.json"  # beside it, of which mined data the checkpoints are
FILES_FILE = "files.json"  # likewise, of what content of data.files or data.packages

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


def open_output(recipe: Recipe, resume: bool, writes: bool) -> Path | None:
    """Ready ``output_dir`` for this run and return the checkpoint to go on from."""
    directory = Path(recipe.output_dir)
    checkpoint = last_checkpoint(recipe) if resume else None
    if checkpoint is not None and (earlier := _read_record(directory / RECIPE_FILE)) is not None:
        _require_same_run(recipe, earlier)
        if writes:  # in one process of several
            _say_what_masking_changes(recipe, earlier)
    digest, mined = mined_digest(recipe.data), directory / MINED_FILE
    if checkpoint is not None and (earlier := _read_record(mined)) is not None and earlier.get("digest") != digest:
        raise RecipeError(
            f"data.name: {recipe.data.name} was mined anew after the checkpoints in {recipe.output_dir} were made; "
            "choose another output_dir, or start over with --no-resume."
        )
    record = directory / FILES_FILE
    earlier = (_read_record(record) or {}) if checkpoint is not None else {}
    contents = data_contents(recipe)
    changed = [name for name in contents if name in earlier and contents[name]["digest"] != earlier[name]["digest"]]
    if changed:
        key = "data.packages" if recipe.data.source == "docstrings" else "data.files"
        raise RecipeError(
            f"{key}: {', '.join(changed)} changed after the checkpoints in {recipe.output_dir} were made; bring the "
            "earlier content back, choose another output_dir, or start over with --no-resume."
        )
    if writes:
        make_directory("output_dir", directory)
        if not resume:
            for path in _checkpoints(directory):
                shutil.rmtree(path)
        write_whole_text(directory / RECIPE_FILE, dump_recipe(recipe))
        _write_record(mined, {"digest": digest} if digest is not None else {})
        _write_record(record, contents)
    return checkpoint


def data_contents(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """What tells each of ``data.files`` or ``data.packages`` from another of its name.

    A file with the size and time that it had when ``output_dir`` was last written is not read again.
    """
    data = recipe.data
    if data.source == "docstrings":
        return {name: {"digest": content_digest("data.packages", source_files(name))} for name in data.packages}
    try:
        earlier = _read_record(Path(recipe.output_dir, FILES_FILE)) or {}
    except RecipeError:
        earlier = {}  # which saves time only
    contents = {}
    for name in data.files or []:
        status = os.stat(name)
        kept = {"size": status.st_size, "modified": status.st_mtime_ns}
        known = earlier.get(name, {})
        same = all(known.get(key) == value for key, value in kept.items())
        # The content decides: a copy that is made anew for each job has another time and the same rows.
        contents[name] = kept | {"digest": known["digest"] if same else content_digest("data.files", [name])}
    return contents


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
        raise RecipeError(
            f"output_dir: {file} says what the checkpoints beside it were made of, but cannot be read; move it away to go "
            "on without it, choose another output_dir, or start over with --no-resume."
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


def _say_what_masking_changes(recipe: Recipe, earlier: dict[str, Any]) -> None:
    before = with_defaults(earlier, Recipe)["fast"]["enabled"]
    if recipe.fast.enabled != before and not recipe.fast.stock_masking and not recipe.model.visual:
        logger.warning(
            "fast.enabled is %r, but the checkpoints in %s were made with %r: stock PyLate lets masked document tokens "
            "win and this package does not, so that scores differ from here on.",
            *(recipe.fast.enabled, recipe.output_dir, before),
        )


def _flat(section: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for name, value in section.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
