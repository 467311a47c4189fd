"""The rows of a recipe: texts or pages, in columns that fit its loss."""

from __future__ import annotations

from pathlib import Path

from datasets import Dataset, IterableDataset, concatenate_datasets

from pylate_fastmaxsim.recipes.config.schema import DataSection, Recipe
from pylate_fastmaxsim.recipes.data.delimited import names_of_rows, names_of_texts
from pylate_fastmaxsim.recipes.data.distillation import load_distillation, number_of_ways
from pylate_fastmaxsim.recipes.data.ids import TextTable, look_up
from pylate_fastmaxsim.recipes.data.judgements import JUDGEMENT_COLUMNS, is_trec, read_judgements, relevant_pairs
from pylate_fastmaxsim.recipes.data.lists import first_of_lists, one_text_a_column
from pylate_fastmaxsim.recipes.data.passages import ID_KEYS, TEXT_KEYS, text_key_of
from pylate_fastmaxsim.recipes.data.tables import load_files, load_table, progress_shown
from pylate_fastmaxsim.recipes.data.text import check_first, is_id, require_text
from pylate_fastmaxsim.recipes.data.triples import has_lists, read_triples
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.files.types import FILE_TYPES, file_type
from pylate_fastmaxsim.recipes.kind import kind_of


def load_rows(recipe: Recipe) -> Dataset:
    """Load the rows of a recipe, with the columns that it uses, in the order of the data.

    Those that are streamed are read by :func:`pylate_fastmaxsim.recipes.data.streaming.stream_rows`.
    """
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
    if not len(dataset):
        raise RecipeError("data: there are no rows.")
    check_first(recipe, dataset[0])
    if recipe.data.collection is not None:
        return _texts_of_ids(recipe, dataset)
    if not recipe.model.visual and recipe.loss.name != "distillation":
        dataset = one_text_a_column(recipe.data, dataset)
    if recipe.data.n_ways is not None:
        with progress_shown():
            options = {"n_ways": recipe.data.n_ways}
            dataset = dataset.map(first_of_lists, fn_kwargs=options, batched=True, desc="Reading lists")
    return kind_of(recipe.model).fit_columns(recipe, dataset)


def _texts_of_ids(recipe: Recipe, rows: Dataset) -> Dataset:
    """Rows with the texts of ``data.collection`` and ``data.queries`` in place of ids."""
    data, n_ways = recipe.data, None
    key, place = (
        ("data.files", ", ".join(Path(file).name for file in data.files)) if data.files else ("data.name", data.name)
    )
    if recipe.loss.name == "distillation":
        if len(rows.column_names) != 3:
            raise RecipeError(
                f"data.columns must be [query, documents, scores] for distillation, got [{', '.join(rows.column_names)}]."
            )
        names, n_ways = ["query", "documents", "scores"], number_of_ways(data, rows, key, place)
    else:
        if len(rows.column_names) < 2:
            raise RecipeError(
                f"data.columns must be the query, its positive and any negatives, got {', '.join(rows.column_names)}."
            )
        rows = one_text_a_column(data, rows)
        names = names_of_rows(len(rows.column_names))
    queries, documents = (
        file and _load_texts(data, name, file)
        for name, file in (("queries", data.queries), ("collection", data.collection))
    )
    if queries is None:
        require_text(rows, rows.column_names[:1], "data")
    return look_up(rows, key, place, names, queries, documents, n_ways)


def _load_texts(data: DataSection, name: str, file: str) -> TextTable:
    table = load_files(f"data.{name}", FILE_TYPES[file_type(file)], {"train": [file]}, names=names_of_texts)
    there = table.column_names
    ids = next((column for column in there if column in ID_KEYS), None)
    text = text_key_of(there, data.text_key) or text_key_of(there)
    if ids is None or text is None:
        raise RecipeError(
            f"data.{name}: {file} must have a column of ids ({', '.join(ID_KEYS)}) and one of texts ({', '.join(TEXT_KEYS)}, or "
            f"data.text_key), it has {', '.join(there)}."
        )
    table = table.select_columns([ids, text, *({"title"} & {*there} - {text})])
    return TextTable(
        f"data.{name}", Path(file).name, ids, table if text == "text" else table.rename_column(text, "text")
    )


def load_columns(data: DataSection, section: str) -> Dataset:
    """Load the rows of a section, with its ``columns``, or with all columns but ids if it names none."""
    dataset = open_rows(data, section)
    if data.collection is not None and {*dataset.column_names} == {*JUDGEMENT_COLUMNS}:
        dataset = relevant_pairs(f"{section}.{'files' if data.files else 'name'}", dataset)
    return dataset.select_columns(used_columns(data, section, dataset.column_names))


def used_columns(data: DataSection, section: str, there: list[str]) -> list[str]:
    """The columns to use of those that the data have."""
    # If all columns are ids, check_columns refuses them.
    named = [name for name in there if not name.startswith("__index_level_")]  # pandas writes it into Parquet
    columns = data.columns or [name for name in named if data.collection is not None or not is_id(name)] or there
    for column in columns:
        if column not in there:
            raise RecipeError(f"{section}.columns: no column {column!r}, the data has the columns {', '.join(there)}.")
    return columns


def open_rows(data: DataSection, section: str, streaming: bool = False) -> Dataset | IterableDataset:
    """The rows of a section as they are, all of them or as a stream."""
    if data.source == "files":
        key, kind = f"{section}.files", FILE_TYPES[file_type(data.files[0])]
        if kind == "json" and has_lists(data.files[0]):
            if streaming:
                raise RecipeError(f"{section}.streaming does not read lists in JSON lines; set it to false.")
            return read_triples(key, data.files)
        if kind == "csv" and data.collection is not None and is_trec(data.files[0]):
            return concatenate_datasets([read_judgements(key, file) for file in data.files])
        names = names_of_texts if section == "mining.corpus" else names_of_rows
        return load_files(key, kind, {"train": data.files}, names=names, columns=data.columns, streaming=streaming)
    return load_table(f"{section}.name", data.name, data.config, split=data.split or "train", streaming=streaming)
