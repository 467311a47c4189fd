"""Rows that are read while they are trained on, of data that does not fit on the disk."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from datasets import Dataset, Features, IterableDataset

from pylate_fastmaxsim.recipes.config.schema import Recipe
from pylate_fastmaxsim.recipes.data.lists import Spread, asks_for_negatives, first_of_lists
from pylate_fastmaxsim.recipes.data.rows import open_rows, used_columns
from pylate_fastmaxsim.recipes.data.tables import table_failure
from pylate_fastmaxsim.recipes.data.text import check_first
from pylate_fastmaxsim.recipes.errors import RecipeError, first_line
from pylate_fastmaxsim.recipes.kind import kind_of

# Rows are shuffled within it, with ``data.seed``.
BUFFER = 10_000
ROWS_AT_ONCE = 1_000


def stream_rows(recipe: Recipe) -> IterableDataset:
    """The rows of a recipe with the columns that it uses, shuffled within a buffer, again and again in the same order.

    Raises
    ------
    RecipeError
        The data cannot be read, its columns do not fit the loss, or it has fewer rows than a batch. In a row that is read
        later: the same, from the iteration.
    """
    rows = open_rows(recipe.data, "data", streaming=True)
    first = next(iter(_taken(rows, 1)), None)
    if first is None:
        raise RecipeError("data: there are no rows to stream.")
    used = rows.select_columns(used_columns(recipe.data, "data", list(first)))
    (first,) = _taken(used, 1)
    check_first(recipe, first)
    read = _Read(recipe, first)
    features = read.checked({name: [value] for name, value in first.items()}, [0]).features
    rows = used.map(
        read,
        batched=True,
        batch_size=ROWS_AT_ONCE,
        with_indices=True,
        remove_columns=list(first),
        features=Features(features),
    )
    size = recipe.training.per_device_train_batch_size
    found = len(_taken(rows, size))
    if found < size:
        raise RecipeError(
            f"training.per_device_train_batch_size must be at most {found}, as many rows as the data has, got {size}."
        )
    # An endless epoch: the trainer cannot count epochs of unknown length, and would go on at a wrong row.
    return rows.shuffle(seed=recipe.data.seed, buffer_size=BUFFER).repeat(None)


def _taken(rows: IterableDataset, count: int) -> list[dict[str, Any]]:
    try:
        return list(rows.take(count))
    except RecipeError:
        raise
    except Exception as error:  # datasets raises its own, the Hub client's and pyarrow's errors alike
        raise table_failure("data", error) from error


class _Read:
    """Checks a batch of rows, with lists of texts made to columns."""

    def __init__(self, recipe: Recipe, first: dict[str, Any]) -> None:
        self.recipe = recipe
        data, self.spread = recipe.data, None
        plain = not any(isinstance(value, (list, dict)) for value in first.values())
        if recipe.loss.name != "distillation" and (not plain or asks_for_negatives(data)):
            self.spread = Spread("data", data, first)

    def __call__(self, batch: dict[str, list], numbers: list[int]) -> dict[str, list]:
        return self.checked(batch, numbers)[:]

    def checked(self, batch: dict[str, list], numbers: list[int]) -> Dataset:
        """The rows of a batch, of which the first has this number in the data."""
        batch = batch if self.spread is None else self.spread(batch, numbers)
        if self.recipe.data.n_ways is not None:
            batch = first_of_lists(batch, self.recipe.data.n_ways)
        try:
            return kind_of(self.recipe.model).fit_columns(self.recipe, Dataset.from_dict(batch))
        except pa.ArrowException as error:
            raise RecipeError(
                f"data: a column holds values of several types in the rows from number {numbers[0]} on: {first_line(error)}"
            ) from None
        except RecipeError as error:
            raise RecipeError(f"{str(error).rstrip('.')} (in the rows from number {numbers[0]} on).") from None
