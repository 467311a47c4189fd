"""The rows that a recipe trains on, and what its model is evaluated on."""

from __future__ import annotations

import logging
from collections import Counter

from datasets import Dataset, IterableDataset

from pylate_fastmaxsim.recipes.config.schema import Recipe
from pylate_fastmaxsim.recipes.data.collection import RecipeData, load_collection
from pylate_fastmaxsim.recipes.data.rows import load_rows, stream_rows
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.evaluation.nano_beir import load_nano_beir

logger = logging.getLogger(__name__)


def load_data(recipe: Recipe) -> RecipeData:
    """Load the rows that a recipe names, keep its columns, hold some out, and load what else it evaluates on.

    Docstring pairs must have been written to a file first, which is what ``prepare`` does.
    """
    if recipe.data.streaming:
        return _evaluated(recipe, stream_rows(recipe), None)
    dataset = load_rows(recipe).shuffle(seed=recipe.data.seed)
    if recipe.data.max_rows is not None:
        dataset = dataset.select(range(min(recipe.data.max_rows, len(dataset))))
    train, held_out = _split(dataset, recipe.evaluation.rows)
    _require_a_batch(recipe, len(train), 0 if held_out is None else len(held_out))
    return _evaluated(recipe, train, held_out)


def _evaluated(recipe: Recipe, train: Dataset | IterableDataset, held_out: Dataset | None) -> RecipeData:
    if recipe.evaluation.beir is not None:
        return RecipeData(train, collection=load_collection(recipe.evaluation.beir, recipe.evaluation.split))
    if recipe.evaluation.nano_beir is not None:
        return RecipeData(train, nano_beir=load_nano_beir(recipe))
    return RecipeData(train, held_out)


def _split(dataset: Dataset, rows: int) -> tuple[Dataset, Dataset | None]:
    """Rows to train on, and the rows of as many whole queries, the first ones, as it takes to hold out ``rows``."""
    if not rows:
        return dataset, None
    query = dataset.column_names[0]
    queries = dataset.select_columns([query])[:][query]
    rows_of = Counter(queries)  # in the order of the rows
    taken, held_out = 0, set()
    for text, count in rows_of.items():
        if taken >= rows:
            break
        held_out.add(text)
        taken += count
    parts: tuple[list[int], list[int]] = ([], [])
    for row, text in enumerate(queries):
        parts[text in held_out].append(row)
    return dataset.select(parts[0]), dataset.select(parts[1])


def _require_a_batch(recipe: Recipe, rows: int, held_out: int) -> None:
    """Refuse data of which the trainer would make no batch; one that is not full is one where it is not dropped."""
    size = recipe.training.per_device_train_batch_size
    least = size if recipe.training.dataloader_drop_last else 1
    if rows >= least:
        if rows < size:
            logger.warning(
                "The data has %d rows to train on, fewer than training.per_device_train_batch_size of %d: every batch has %d.",
                rows,
                size,
                rows,
            )
        return
    if held_out:
        raise RecipeError(
            f"evaluation.rows must leave at least one training batch, but the data has {rows + held_out} rows, "
            f"{held_out} are held out and a batch takes {least}."
        )
    raise RecipeError(
        f"training.per_device_train_batch_size must be at most {rows}, as many rows as the data has, got {size}; lower it "
        "or set training.dataloader_drop_last to false."
    )
