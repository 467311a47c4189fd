"""The records in the folder of a training run: of which recipe, data, model and processes its checkpoints are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.files.json import write_json

RECIPE_FILE = "recipe-of-checkpoints.yaml"
MINED_FILE = "mined.json"  # of which mined data
FILES_FILE = "files.json"  # of what content of data and model on this machine
PROCESSES_FILE = "processes.json"  # of how many processes, among which rows are divided


def write_record(file: Path, values: dict[str, Any]) -> None:
    """Of nothing there is no record."""
    if values:
        write_json(file, values)
    else:
        file.unlink(missing_ok=True)


def read_record(file: Path) -> dict[str, Any]:
    """What was written of the checkpoints beside it.

    Raises
    ------
    RecipeError
        It is damaged.
    """
    if not file.exists():
        return {}
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
