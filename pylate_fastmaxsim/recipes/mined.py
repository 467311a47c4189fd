"""Data that ``fastmaxsim mine`` writes: what training must know of it."""

from __future__ import annotations

import json
from pathlib import Path

from pylate_fastmaxsim.recipes.schema import DataSection, Recipe

# Written by mining into the folder of the data, whose last file it is.
SUMMARY_FILE = "mining.json"


def mined_digest(data: DataSection) -> str | None:
    """What tells mined data from what was mined into the same folder before; None of data that was not mined."""
    if data.source != "distillation" or not Path(data.name, SUMMARY_FILE).exists():
        return None
    return json.loads(Path(data.name, SUMMARY_FILE).read_text(encoding="utf-8")).get("digest")


def is_to_be_mined(recipe: Recipe) -> bool:
    """Whether a recipe mines the data it trains on, and there is none yet."""
    return recipe.mining is not None and recipe.data.source == "distillation" and not Path(recipe.data.name).exists()
