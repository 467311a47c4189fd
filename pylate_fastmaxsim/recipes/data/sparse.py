"""Columns of texts for Sentence Transformers, whose collator takes them in their order."""

from __future__ import annotations

from datasets import Dataset

from pylate_fastmaxsim.recipes.config.schema import Recipe
from pylate_fastmaxsim.recipes.data.text import require_a_score_each, require_text
from pylate_fastmaxsim.recipes.errors import RecipeError

# Read as teacher scores by the collator, whatever the loss, or as the name of a data set.
RESERVED = ("label", "labels", "score", "scores", "dataset_name", "return_loss")


def check_columns(recipe: Recipe, dataset: Dataset, columns: list[str]) -> None:
    """Refuse columns that do not fit the loss, or that the collator would not take as texts."""
    query, *others = columns
    reserved = [column for column in columns if column in RESERVED]
    if recipe.loss.name == "distillation":
        if len(others) != 2 or reserved != others[1:]:
            raise RecipeError(
                f"data.columns must be [query, documents, scores] for distillation, got [{', '.join(columns)}]."
            )
        require_text(dataset, [query], "data")
        require_a_score_each(dataset, *others)
        return
    if reserved:
        raise RecipeError(
            f"data.columns: {reserved[0]!r} is no text for Sentence Transformers; name only the query, its positive and any "
            "negatives, and rename the column if it holds texts."
        )
    if not others:
        raise RecipeError(f"data.columns must be the query, its positive and any negatives, got [{query}].")
    require_text(dataset, columns, "data")
