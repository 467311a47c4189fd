"""The checkpoints in the folder of a training run."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from transformers import TrainerState

from pylate_fastmaxsim.recipes.config.schema import Recipe

# The trainer writes this file last, so a checkpoint that has it is complete.
CHECKPOINT_LAST_FILE = "trainer_state.json"


def last_checkpoint(recipe: Recipe) -> Path | None:
    """The newest complete checkpoint of a recipe; one that an interruption cut short does not count."""
    steps = checkpoints_in(Path(recipe.output_dir))
    return next(filter(is_complete, sorted(steps, key=steps.get, reverse=True)), None)


def is_complete(checkpoint: Path) -> bool:
    """Whether the file that is written last is there to its end, which it is not where the disk was full by then."""
    file = checkpoint / CHECKPOINT_LAST_FILE
    try:
        return file.exists() and isinstance(json.loads(file.read_text(encoding="utf-8")), dict)
    except ValueError:
        return False


def checkpoints_in(directory: Path) -> dict[Path, int]:
    """The checkpoints of the trainer and their steps; what users put beside them under longer names is theirs."""
    names = {path: re.fullmatch(r"checkpoint-([0-9]+)", path.name) for path in directory.glob("checkpoint-*")}
    return {path: int(name[1]) for path, name in names.items() if name and path.is_dir()}


def trained_state(checkpoint: Path | None) -> TrainerState | None:
    """The state of a checkpoint with no step left to do, from which the trainer would do one step more."""
    if checkpoint is None:
        return None
    state = TrainerState.load_from_json(str(checkpoint / CHECKPOINT_LAST_FILE))
    return state if state.global_step >= state.max_steps else None


def remove_checkpoints(directory: Path) -> None:
    """Remove them, and first what tells a whole one: what an interruption leaves of one must not be gone on from."""
    checkpoints = checkpoints_in(directory)
    for path in checkpoints:
        (path / CHECKPOINT_LAST_FILE).unlink(missing_ok=True)
    for path in checkpoints:
        shutil.rmtree(path)
