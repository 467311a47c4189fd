"""The folder of a training run: which checkpoints it has, and of which recipe and data they are."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from pylate_fastmaxsim.recipes.digest import content_digest
from pylate_fastmaxsim.recipes.disk import make_directory
from pylate_fastmaxsim.recipes.load import dump_recipe
from pylate_fastmaxsim.recipes.mined import mined_digest
from pylate_fastmaxsim.recipes.schema import Recipe, RecipeError

RECIPE_FILE = "recipe.yaml"
MINED_FILE = "mined.json"  # beside it, of which mined data the checkpoints are
FILES_FILE = "files.json"  # likewise, of what content of data.files

# The trainer writes this file last, so a checkpoint that has it is complete.
CHECKPOINT_LAST_FILE = "trainer_state.json"

# What a run may change when it goes on from a checkpoint: none of it changes what is learned.
FREE_TO_CHANGE = {
    "name",
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
    "fast.enabled",
    "fast.padding_free",
    "fast.compile",
    "fast.ring",
    "mining.batch_size",
    "mining.documents_per_part",
    "mining.rows_per_part",
}


def last_checkpoint(recipe: Recipe) -> Path | None:
    """The newest complete checkpoint of a recipe; one that an interruption cut short does not count."""
    steps = _checkpoints(Path(recipe.output_dir))
    complete = [path for path in steps if (path / CHECKPOINT_LAST_FILE).exists()]
    return max(complete, key=steps.get, default=None)


def _checkpoints(directory: Path) -> dict[Path, int]:
    """The checkpoints of the trainer and their steps; what users put beside them under longer names is theirs."""
    names = {path: re.fullmatch(r"checkpoint-([0-9]+)", path.name) for path in directory.glob("checkpoint-*")}
    return {path: int(name[1]) for path, name in names.items() if name and path.is_dir()}


def open_output(recipe: Recipe, resume: bool, writes: bool) -> Path | None:
    """Ready ``output_dir`` for this run and return the checkpoint to go on from."""
    directory = Path(recipe.output_dir)
    checkpoint = last_checkpoint(recipe) if resume else None
    if checkpoint is not None and (directory / RECIPE_FILE).exists():
        _require_same_run(recipe, yaml.safe_load((directory / RECIPE_FILE).read_text(encoding="utf-8")))
    digest, mined = mined_digest(recipe.data), directory / MINED_FILE
    if checkpoint is not None and mined.exists() and json.loads(mined.read_text())["digest"] != digest:
        raise RecipeError(
            f"data.name: {recipe.data.name} was mined anew after the checkpoints in {recipe.output_dir} were made; "
            "choose another output_dir, or start over with --no-resume."
        )
    record = directory / FILES_FILE
    earlier = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    files = _files(recipe, earlier)
    changed = [name for name in files if name in earlier and files[name]["digest"] != earlier[name]["digest"]]
    if checkpoint is not None and changed:
        raise RecipeError(
            f"data.files: {', '.join(changed)} changed after the checkpoints in {recipe.output_dir} were made; bring the "
            "earlier content back, choose another output_dir, or start over with --no-resume."
        )
    if writes:
        make_directory("output_dir", directory)
        if not resume:
            for path in _checkpoints(directory):
                shutil.rmtree(path)
        (directory / RECIPE_FILE).write_text(dump_recipe(recipe), encoding="utf-8")
        mined.unlink(missing_ok=True)
        if digest is not None:
            mined.write_text(json.dumps({"digest": digest}) + "\n", encoding="utf-8")
        record.unlink(missing_ok=True)
        if files:
            record.write_text(json.dumps(files, indent=2) + "\n", encoding="utf-8")
    return checkpoint


def _files(recipe: Recipe, earlier: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What tells each of ``data.files`` from another of its name; one with the size and time it had is not read again."""
    files = {}
    for name in recipe.data.files or []:
        status = os.stat(name)
        kept = {"size": status.st_size, "modified": status.st_mtime_ns}
        known = earlier.get(name, {})
        same = all(known.get(key) == value for key, value in kept.items())
        # The content decides: a copy that is made anew for each job has another time and the same rows.
        files[name] = kept | {"digest": known["digest"] if same else content_digest([name])}
    return files


def _require_same_run(recipe: Recipe, earlier: dict[str, Any]) -> None:
    before, now = _flat(earlier), _flat(asdict(recipe))
    for key in sorted(before.keys() | now.keys()):
        if key not in FREE_TO_CHANGE and before.get(key) != now.get(key):
            raise RecipeError(
                f"{key} is {now.get(key)!r}, but the checkpoints in {recipe.output_dir} were made with "
                f"{before.get(key)!r}; keep it, choose another output_dir, or start over with --no-resume."
            )


def _flat(section: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for name, value in section.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
