"""The rows of a recipe: texts or pages, in columns that fit its loss."""

from __future__ import annotations

from pathlib import Path

from datasets import Dataset, Sequence, Value

from pylate_fastmaxsim.recipes.backend import backend
from pylate_fastmaxsim.recipes.config.schema import FILE_TYPES, DataSection, Recipe
from pylate_fastmaxsim.recipes.data.distillation import load_distillation
from pylate_fastmaxsim.recipes.data.lists import one_text_a_column
from pylate_fastmaxsim.recipes.data.tables import load_files, load_table
from pylate_fastmaxsim.recipes.data.text import is_id, query_named
from pylate_fastmaxsim.recipes.errors import RecipeError


def load_rows(recipe: Recipe) -> Dataset:
    """Load the rows of a recipe, with the columns that it uses, in the order of the data."""
    return _load_mined(recipe) if recipe.data.source == "distillation" else _load_checked(recipe)


def _load_mined(recipe: Recipe) -> Dataset:
    try:
        return load_distillation(recipe.data)
    except RecipeError as error:
        if recipe.mining is not None and not Path(recipe.data.name).exists():  # nor on the Hub
            raise RecipeError(
                f"data.name: {recipe.data.name} is not there yet; run `fastmaxsim mine` with this recipe first, which writes it."
            ) from error
        raise


def _load_checked(recipe: Recipe) -> Dataset:
    dataset = load_columns(recipe.data, "data")
    if not recipe.model.visual and recipe.loss.name != "distillation":
        dataset = one_text_a_column(recipe.data, dataset)
    if recipe.model.kind == "colbert":
        dataset = query_named(recipe, dataset)
    backend(recipe.model, __package__).check_columns(recipe, dataset, dataset.column_names)
    return _scores_as_floats(dataset) if recipe.loss.name == "distillation" else dataset


def _scores_as_floats(dataset: Dataset) -> Dataset:
    """Scores as floats: PyLate's loss and evaluator fail on integers."""
    scores = dataset.column_names[-1]
    if "int" not in dataset.features[scores].feature.dtype:
        return dataset
    return dataset.cast_column(scores, Sequence(Value("float32")))


def load_columns(data: DataSection, section: str) -> Dataset:
    """Load the rows of a section, with its ``columns``, or with all columns but ids if it names none."""
    dataset = _load_rows(data, section)
    # If all columns are ids, check_columns refuses them.
    columns = data.columns or [name for name in dataset.column_names if not is_id(name)] or dataset.column_names
    for column in columns:
        if column not in dataset.column_names:
            raise RecipeError(
                f"{section}.columns: no column {column!r}, the data has the columns {', '.join(dataset.column_names)}."
            )
    return dataset.select_columns(columns)


def _load_rows(data: DataSection, section: str) -> Dataset:
    if data.source == "files":
        kind = FILE_TYPES[Path(data.files[0]).suffix]
        return load_files(f"{section}.files", kind, {"train": data.files})
    return load_table(f"{section}.name", data.name, data.config, split=data.split or "train")
