"""Rows that a recipe trains on, and what is made before: docstring pairs, a model from scratch or a token table."""

import hashlib
import json
import logging
import re
from collections import Counter
from dataclasses import asdict, replace
from itertools import accumulate
from pathlib import Path

from datasets import Dataset, concatenate_datasets

from pylate_fastmaxsim.files.replace import replace_folder
from pylate_fastmaxsim.recipes.config.schema import DataSection, Recipe
from pylate_fastmaxsim.recipes.data.collection import RecipeData, load_collection
from pylate_fastmaxsim.recipes.data.docstrings import docstring_pairs
from pylate_fastmaxsim.recipes.data.rows import load_rows
from pylate_fastmaxsim.recipes.data.text import count_empty
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.evaluation.evaluate import load_nano_beir
from pylate_fastmaxsim.recipes.files import made_directory
from pylate_fastmaxsim.recipes.kind import Kind
from pylate_fastmaxsim.recipes.models.from_scratch import build_model, build_token_table
from pylate_fastmaxsim.recipes.models.load import kind_of, load_model
from pylate_fastmaxsim.recipes.training.run_directory import remove_checkpoints

logger = logging.getLogger(__name__)

PAIRS = "pairs.parquet"
MODEL = "model"


def prepare(recipe: Recipe, anew: bool = False) -> Recipe:
    """The recipe with docstring pairs and a model that is made replaced by files under ``output_dir/prepared``.

    Runs with the same keys share the files, so that they start from the same rows, tokenizer and weights, also after
    the packages or the data have changed. ``anew`` makes them again, and removes checkpoints, which need the old ones.
    """
    if recipe.data.source != "docstrings" and recipe.model.name_or_path is not None:
        return recipe
    root = Path(recipe.output_dir, "prepared")
    directory = root / _digest(recipe)
    if anew or not directory.is_dir():
        _make(recipe, root, directory, anew)
    return _prepared(recipe, directory)


def _prepared(recipe: Recipe, directory: Path) -> Recipe:
    data, model = recipe.data, recipe.model
    if data.source == "docstrings":
        data = replace(data, source="files", packages=None, files=[str(directory / PAIRS)])
    if model.name_or_path is None:
        model = model.loaded_from(str(directory / MODEL))
    return replace(recipe, data=data, model=model)


def _digest(recipe: Recipe) -> str:
    parts = [asdict(recipe.data), asdict(recipe.model), recipe.training.seed, recipe.evaluation.rows]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def _make(recipe: Recipe, root: Path, directory: Path, anew: bool) -> None:
    kind = kind_of(recipe.model)
    if recipe.model.name_or_path is not None:
        load_model(recipe.model, "cpu", recipe.training.seed)  # its errors come before anything is written

    def write(scratch: Path) -> None:
        scratch.mkdir()
        if recipe.data.source == "docstrings":
            pairs = docstring_pairs(recipe.data.packages, recipe.data.max_rows, recipe.data.seed)
            Dataset.from_list(pairs).to_parquet(scratch / PAIRS)
        if recipe.model.build is not None:
            rows = load_data(_prepared(recipe, scratch)).train
            build_model(kind, recipe.model, rows, recipe.training.seed, scratch / MODEL)
        if recipe.model.token_table is not None:
            build_token_table(recipe.model, recipe.training.seed, scratch / MODEL)
        if anew and directory.is_dir():
            # Before what they need, and after what may fail.
            remove_checkpoints(Path(recipe.output_dir))

    with made_directory("output_dir", root):  # a recipe that cannot run leaves nothing behind
        replace_folder(directory, write)


def load_data(recipe: Recipe) -> RecipeData:
    """Load the rows that a recipe names, keep its columns, hold some out, and load what else it evaluates on.

    Docstring pairs must have been written to a file first, which is what ``prepare`` does.
    """
    kind = kind_of(recipe.model)
    train, held_out, empty = load_rows(recipe, kind), None, None
    if not recipe.data.streaming:
        train = _with_more(recipe, kind, _chosen(train, recipe.data))
        if empty := count_empty(train):
            logger.warning("The data has %d rows with an empty query or document, which are trained on as well.", empty)
        train, held_out = _split(train, recipe.evaluation.rows)
        _require_a_batch(recipe, len(train), 0 if held_out is None else len(held_out))
    if recipe.evaluation.data is not None:
        held_out = _load_further(recipe, kind, recipe.evaluation.data, "evaluation.data")
    if recipe.evaluation.beir is not None:
        collections = [load_collection(recipe.evaluation.beir, recipe.evaluation.split)]
        return RecipeData(train, collections=collections, empty=empty)
    if recipe.evaluation.nano_beir is not None:
        return RecipeData(train, collections=load_nano_beir(recipe, kind), empty=empty)
    return RecipeData(train, held_out, empty=empty)


def _chosen(rows: Dataset, data: DataSection) -> Dataset:
    """Rows in the order of their seed, ``max_rows`` of them."""
    rows = rows.shuffle(seed=data.seed)
    return rows if data.max_rows is None else rows.select(range(min(data.max_rows, len(rows))))


def _load_further(recipe: Recipe, kind: Kind, data: DataSection, section: str) -> Dataset:
    try:
        return _chosen(load_rows(replace(recipe, data=data), kind), data)
    except RecipeError as error:  # which names keys of data
        raise RecipeError(re.sub(r"^data\b", lambda _: section, str(error))) from error


def _with_more(recipe: Recipe, kind: Kind, rows: Dataset) -> Dataset:
    if recipe.data.more is None:
        return rows
    parts = [rows]
    for place, data in enumerate(recipe.data.more):
        section = f"data.more[{place}]"
        part = _load_further(recipe, kind, data, section)
        if {rows.format["type"], part.format["type"]} != {None}:
            raise RecipeError(
                f"{section} cannot be mixed: data.collection and data.source distillation are read by ids."
            )
        names, own = rows.column_names, part.column_names
        sizes = [[len(value) if isinstance(value, list) else 1 for value in each[0].values()] for each in (rows, part)]
        if sizes[0] != sizes[1]:
            raise RecipeError(
                f"{section} must have columns as data has ({', '.join(names)}; {sizes[0]} texts), got {', '.join(own)} "
                f"({sizes[1]} texts); choose them with columns, negatives_per_query or n_ways."
            )
        parts.append(part.rename_columns(dict(zip(own, names, strict=True))).cast(rows.features))
    return concatenate_datasets(parts).shuffle(seed=recipe.data.seed)


def _split(dataset: Dataset, rows: int) -> tuple[Dataset, Dataset | None]:
    """Rows to train on, and the rows of as many whole queries, the first ones, as it takes to hold out ``rows``."""
    if not rows:
        return dataset, None
    query = dataset.column_names[0]
    queries = dataset.select_columns([query])[:][query]
    counts = Counter(queries)  # in the order of the rows
    before = accumulate(counts.values(), initial=0)
    held_out = {text for text, taken in zip(counts, before, strict=False) if taken < rows}
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
