"""The checkpoints in the folder of a training run."""

from __future__ import annotations

import json
import logging
import re
import shutil
import zipfile
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers import TrainerState

from pylate_fastmaxsim.recipes.config.schema import Recipe

logger = logging.getLogger(__name__)

# The trainer writes it last, so a checkpoint that has it is complete.
CHECKPOINT_LAST_FILE = "trainer_state.json"


def last_checkpoint(recipe: Recipe) -> Path | None:
    """The newest complete checkpoint in a recipe's ``output_dir``."""
    steps = checkpoints_in(Path(recipe.output_dir))
    return next(filter(is_complete, sorted(steps, key=steps.get, reverse=True)), None)


def is_complete(checkpoint: Path) -> bool:
    """Whether the last file of a checkpoint is there, and no file is cut short, as on a full disk."""
    file = checkpoint / CHECKPOINT_LAST_FILE
    try:
        if not isinstance(json.loads(file.read_text(encoding="utf-8")), dict):
            return False
    except FileNotFoundError:
        return False
    except (ValueError, RecursionError):
        cut = [file]
    else:
        cut = [path for path in checkpoint.rglob("*") if _is_cut_short(path)]
    if cut:
        logger.warning("%s is damaged, so %s is not gone on from.", cut[0], checkpoint)
    return not cut


def _is_cut_short(file: Path) -> bool:
    if file.suffix == ".safetensors":
        try:
            with safe_open(file, framework="pt"):
                return False
        except (OSError, SafetensorError):
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
    """Remove all checkpoints. First the file that marks them as complete, in case this is interrupted."""
    checkpoints = checkpoints_in(directory)
    for path in checkpoints:
        (path / CHECKPOINT_LAST_FILE).unlink(missing_ok=True)
    for path in checkpoints:
        shutil.rmtree(path)
