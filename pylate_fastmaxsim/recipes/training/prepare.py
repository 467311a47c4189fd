"""Make what a run needs before it starts, and keep it: docstring pairs, a model from scratch or a token table."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from datasets import Dataset

from pylate_fastmaxsim.files.replace import replace_folder
from pylate_fastmaxsim.recipes.config.schema import ModelSection, Recipe
from pylate_fastmaxsim.recipes.data.docstrings import docstring_pairs
from pylate_fastmaxsim.recipes.files import make_directory
from pylate_fastmaxsim.recipes.models.from_scratch import build_model
from pylate_fastmaxsim.recipes.models.load import load_model
from pylate_fastmaxsim.recipes.trainers.checkpoints import remove_checkpoints
from pylate_fastmaxsim.recipes.training.inputs import load_data

PAIRS = "pairs.parquet"
MODEL = "model"


def prepare(recipe: Recipe, anew: bool = False) -> Recipe:
    """The recipe with docstring pairs and a model that is made replaced by files under ``output_dir/prepared``.

    Runs with the same keys share the files, so that they start from the same rows, tokenizer and weights, also after
    the packages or the data have changed. ``anew`` makes them again, and removes checkpoints, which need the old ones.

    Raises
    ------
    RecipeError
        The rows do not fit the recipe, or its model cannot be loaded.
    """
    if recipe.data.source != "docstrings" and not _is_made(recipe.model):
        return recipe
    root = Path(recipe.output_dir, "prepared")
    directory = root / _key(recipe)
    if anew or not directory.is_dir():
        _make(recipe, root, directory, anew)
    return _prepared(recipe, directory)


def _prepared(recipe: Recipe, directory: Path) -> Recipe:
    data, model = recipe.data, recipe.model
    if data.source == "docstrings":
        data = replace(data, source="files", packages=None, files=[str(directory / PAIRS)])
    if _is_made(model):
        model = model.loaded_from(str(directory / MODEL))
    return replace(recipe, data=data, model=model)


def _is_made(model: ModelSection) -> bool:
    return model.name_or_path is None


def _key(recipe: Recipe) -> str:
    """A name for what depends on these keys of the recipe."""
    parts = [asdict(recipe.data), asdict(recipe.model), recipe.training.seed, recipe.evaluation.rows]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def _make(recipe: Recipe, root: Path, directory: Path, anew: bool) -> None:
    if not _is_made(recipe.model):
        load_model(recipe.model, "cpu", recipe.training.seed)  # its errors come before anything is written
    made = make_directory("output_dir", root)

    def write(scratch: Path) -> None:
        scratch.mkdir()
        if recipe.data.source == "docstrings":
            pairs = docstring_pairs(recipe.data.packages, recipe.data.max_rows, recipe.data.seed)
            Dataset.from_list(pairs).to_parquet(scratch / PAIRS)
        if recipe.model.build is not None:
            rows = load_data(replace(recipe, data=_prepared(recipe, scratch).data)).train
            build_model(recipe.model, _texts(rows), recipe.training.seed, scratch / MODEL)
        if recipe.model.token_table is not None:
            # Of PyLate, beside which not every kind of model is trained.
            from pylate_fastmaxsim.recipes.models.token_table import build_token_table

            build_token_table(recipe.model, recipe.training.seed, scratch / MODEL)
        if anew and directory.is_dir():
            # Before what they need, and after what may fail.
            remove_checkpoints(Path(recipe.output_dir))

    try:
        replace_folder(directory, write)
    except BaseException:
        for path in made:  # a recipe that cannot run leaves nothing behind
            with suppress(OSError):
                path.rmdir()
        raise


def _texts(rows: Dataset) -> Iterator[str]:
    """Every text of every column, those in lists of documents included."""
    for row in rows:
        for value in row.values():
            yield from (text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str))
