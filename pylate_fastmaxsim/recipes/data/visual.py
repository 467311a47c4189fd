"""Columns of pages, as colpali-engine's dataset takes them."""

from __future__ import annotations

import pyarrow.compute as pc
from datasets import Dataset, Image

from pylate_fastmaxsim.recipes.config.schema import LOSSES_WITH_NEGATIVES, Recipe
from pylate_fastmaxsim.recipes.data.text import require_text
from pylate_fastmaxsim.recipes.errors import RecipeError


def check_columns(recipe: Recipe, dataset: Dataset, columns: list[str]) -> None:
    """Refuse columns other than a query, its page and, for losses with negatives, equally many of them in each row."""
    negatives = recipe.loss.name in LOSSES_WITH_NEGATIVES
    if len(columns) != 2 + negatives:
        wanted = "[query, image, negatives]" if negatives else "[query, image]"
        raise RecipeError(f"data.columns must be {wanted} for the loss {recipe.loss.name}, got [{', '.join(columns)}].")
    query, *images = columns
    require_text(dataset, [query], "data")
    for column in images:
        feature = dataset.features[column]
        if not isinstance(getattr(feature, "feature", feature), Image):
            raise RecipeError(f"data.columns: {column!r} must hold images, but it holds {feature}.")
    if negatives and not isinstance(dataset.features[columns[2]], Image):
        counts = pc.list_value_length(dataset.data.column(columns[2])).unique().to_pylist()
        if len(counts) > 1:
            raise RecipeError(
                f"data.columns: every row of {columns[2]!r} must hold the same number of images, "
                f"but rows hold {min(counts)} to {max(counts)}."
            )
