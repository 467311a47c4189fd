"""Data that ``fastmaxsim mine`` writes: what training must know of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pylate_fastmaxsim.recipes.config.schema import DataSection, Recipe
from pylate_fastmaxsim.recipes.errors import RecipeError

# Written by mining into the folder of the data, whose last file it is.
SUMMARY_FILE = "mining.json"


def mined_digest(data: DataSection) -> str | None:
    """What tells mined data from what was mined into the same folder before; None of data that was not mined."""
    if data.source != "distillation" or not Path(data.name, SUMMARY_FILE).exists():
        return None
    return read_summary(Path(data.name)).get("digest")


def read_summary(folder: Path) -> dict[str, Any]:
    """What mining wrote last into a folder of data.

    Raises
    ------
    RecipeError
        The file is damaged, or may not be read.
    """
    file = folder / SUMMARY_FILE
    try:
        summary = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(summary, dict):
            return summary
        reason = "it is not a JSON object"
    except OSError as error:
        reason = error.strerror
    except ValueError:
        reason = "it is not JSON"
    raise _unreadable(file, reason)


def settings_of(summary: dict[str, Any], folder: Path) -> dict[str, Any]:
    """With which settings data were mined, section by section. Raises as :func:`read_summary`."""
    settings = summary.get("settings")
    if isinstance(settings, dict) and all(isinstance(settings.get(part), dict) for part in ("mining", "model")):
        return settings
    raise _unreadable(folder / SUMMARY_FILE, "it does not say with which settings data were mined")


def is_to_be_mined(recipe: Recipe) -> bool:
    """Whether a recipe mines the data it trains on, and there is none yet."""
    return recipe.mining is not None and recipe.data.source == "distillation" and not Path(recipe.data.name).exists()


def _unreadable(file: Path, reason: str | None) -> RecipeError:
    """What to say of a summary that is no use."""
    return RecipeError(f"data.name: {file} cannot be read: {reason}; bring it back, or mine again with --no-resume.")
