"""Data that ``fastmaxsim mine`` writes: what training must know of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pylate_fastmaxsim.recipes.config.schema import DataSection, Recipe

# Written by mining into the folder of the data, whose last file it is.
SUMMARY_FILE = "mining.json"


def mined_digest(data: DataSection) -> str | None:
    """What tells mined data from what was mined into the same folder before; None of data that was not mined."""
    if data.source != "distillation" or not Path(data.name, SUMMARY_FILE).exists():
        return None
    return read_summary(Path(data.name)).get("digest")


def read_summary(folder: Path) -> dict[str, Any]:
    """What mining wrote last into a folder of data."""
    return json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))


def is_to_be_mined(recipe: Recipe) -> bool:
    """Whether a recipe mines the data it trains on, and there is none yet."""
    return recipe.mining is not None and recipe.data.source == "distillation" and not Path(recipe.data.name).exists()
