"""The checkpoints in the folder of a training run."""

from __future__ import annotations

import re
import shutil
import zipfile
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers import TrainerState

from pylate_fastmaxsim.files.replace import remove_file
from pylate_fastmaxsim.integrations.log import log_once
from pylate_fastmaxsim.recipes.config.schema import Recipe
from pylate_fastmaxsim.recipes.files import parse_json

# The trainer writes it last, so a checkpoint that has it is complete.
CHECKPOINT_LAST_FILE = "trainer_state.json"


def last_checkpoint(recipe: Recipe) -> Path | None:
    """The newest complete checkpoint in a recipe's ``output_dir``."""
    steps = checkpoints_in(Path(recipe.output_dir))
    return next(filter(is_complete, sorted(steps, key=steps.get, reverse=True)), None)


def is_complete(checkpoint: Path) -> bool:
    """Whether the last file of a checkpoint is there, and no file is cut short, as by a power cut."""
    if not (checkpoint / CHECKPOINT_LAST_FILE).exists():
        return False
    damaged = [path for path in sorted(checkpoint.rglob("*")) if _is_cut_short(path)]
    if damaged:
        log_once(
            "%s is damaged, so training does not go on from %s but from the checkpoint before it, if there is one.",
            damaged[0],
            checkpoint,
        )
    return not damaged


def _is_cut_short(file: Path) -> bool:
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt"):
                return False
        if file.suffix == ".json":
            return not isinstance(parse_json(file.read_text(encoding="utf-8")), (dict, list))
    except (OSError, ValueError, SafetensorError):
        return True
    return file.suffix in (".pt", ".pth", ".bin") and not zipfile.is_zipfile(file)


def checkpoints_in(directory: Path) -> dict[Path, int]:
    """The trainer's checkpoints and their steps. Other names, such as ``checkpoint-8-best``, are the user's."""
    names = {path: re.fullmatch(r"checkpoint-([0-9]+)", path.name) for path in directory.glob("checkpoint-*")}
    return {path: int(name[1]) for path, name in names.items() if name and path.is_dir()}


def trained_state(checkpoint: Path | None) -> TrainerState | None:
    """The state of a checkpoint if no step is left to do, else None. The trainer itself would do one step more."""
    if checkpoint is None:
        return None
    state = TrainerState.load_from_json(str(checkpoint / CHECKPOINT_LAST_FILE))
    return state if state.global_step >= state.max_steps else None


def remove_checkpoints(directory: Path) -> None:
    """Remove all checkpoints. First the file that marks them as complete, in case this is interrupted, even by a power cut."""
    checkpoints = checkpoints_in(directory)
    for path in checkpoints:
        remove_file(path / CHECKPOINT_LAST_FILE)
    for path in checkpoints:
        shutil.rmtree(path)
