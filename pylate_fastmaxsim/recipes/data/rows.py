"""The rows of a recipe: texts or pages, in columns that fit its loss."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset, Features, IterableDataset, Sequence, Value, concatenate_datasets, disable_progress_bars
from datasets.exceptions import DatasetGenerationError

from pylate_fastmaxsim.recipes.config.schema import DataSection, Recipe, RowsSection
from pylate_fastmaxsim.recipes.data.collection import JUDGEMENT_COLUMNS, is_trec, read_judgements, relevant_pairs
from pylate_fastmaxsim.recipes.data.ids import TextTable, load_distillation, look_up
from pylate_fastmaxsim.recipes.data.lists import (
    ID_KEYS,
    TEXT_KEYS,
    Spread,
    asks_for_negatives,
    names_of_rows,
    spread_lists,
    text_key_of,
)
from pylate_fastmaxsim.recipes.data.tables import load_files, load_table, loading, open_text, require_text_columns
from pylate_fastmaxsim.recipes.data.text import check_first, is_id_column, require_columns_of_loss
from pylate_fastmaxsim.recipes.errors import RecipeError, first_line
from pylate_fastmaxsim.recipes.files import FILE_TYPES, file_type
from pylate_fastmaxsim.recipes.kind import Kind

# Streamed rows are shuffled within it, with ``data.seed``.
BUFFER = 10_000
ROWS_AT_ONCE = 1_000

# Of ColBERT's JSON lines.
TRIPLES = {"query": Value("string"), "positive": Value("string"), "negatives": Sequence(Value("string"))}
SCORED = {"query": Value("string"), "documents": Sequence(Value("string")), "scores": Sequence(Value("float32"))}


def load_rows(recipe: Recipe, kind: Kind) -> Dataset | IterableDataset:
    """Load the rows of a recipe, with the columns that it uses, in the order of the data.

    With ``data.streaming`` they are a stream, shuffled within a buffer, again and again in the same order.
    """
    if recipe.data.source != "distillation":
        return _load_checked(recipe, kind)
    try:
        return load_distillation(recipe.data)
    except RecipeError as error:
        if recipe.mining is not None and not Path(recipe.data.name).exists():  # nor on the Hub
            raise RecipeError(
                f"data.name: {recipe.data.name} is not there yet; run `fastmaxsim mine` with this recipe first, which writes it."
            ) from error
        raise


def _load_checked(recipe: Recipe, kind: Kind) -> Dataset | IterableDataset:
    data = recipe.data
    rows = load_columns(data, "data")
    first = _first(rows)
    check_first(recipe, first)
    if data.streaming:
        return _stream(recipe, kind, rows, first)
    if not recipe.model.visual and recipe.loss.name != "distillation":
        rows = spread_lists(data, rows)
    if data.collection is not None:
        return _texts_of_ids(recipe, rows)
    if data.n_ways is not None:
        rows = rows.map(truncate_lists, fn_kwargs={"n_ways": data.n_ways}, batched=True, desc="Reading lists")
    return kind.fit_columns(recipe, rows)


def _first(rows: Dataset | IterableDataset) -> dict[str, Any]:
    with loading("data"):
        first = next(iter(rows.take(1)), None)
    if first is None:
        raise RecipeError("data: there are no rows.")
    return first


def truncate_lists(batch: dict[str, list], n_ways: int) -> dict[str, list]:
    """The first ``n_ways`` entries of all lists in a batch of rows."""
    return {
        name: [value[:n_ways] if isinstance(value, list) else value for value in values]
        for name, values in batch.items()
    }


def _texts_of_ids(recipe: Recipe, rows: Dataset) -> Dataset:
    data = recipe.data
    key, place = (
        ("data.files", ", ".join(Path(file).name for file in data.files)) if data.files else ("data.name", data.name)
    )
    require_columns_of_loss(recipe, rows.column_names)
    distilled = recipe.loss.name == "distillation"
    names = ["query", "documents", "scores"] if distilled else names_of_rows(len(rows.column_names))
    if data.queries is None:
        require_text_columns(rows, rows.column_names[:1], "data")
    queries, documents = (
        file and _load_texts(data, name, file)
        for name, file in (("queries", data.queries), ("collection", data.collection))
    )
    return look_up(data, rows, key, place, names, queries, documents)


def _load_texts(data: DataSection, name: str, file: str) -> TextTable:
    table = load_files(f"data.{name}", {"train": [file]}, names=names_of_texts)
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


def load_columns(data: RowsSection, section: str) -> Dataset | IterableDataset:
    """Load the rows of a section, with its ``columns``, or with all columns but ids if it names none."""
    rows = _open_rows(data, section)
    if data.collection is not None and {*rows.column_names} == {*JUDGEMENT_COLUMNS}:
        rows = relevant_pairs(f"{section}.{'files' if data.files else 'name'}", rows)
    there = rows.column_names or list(_first(rows))  # a stream may not know them
    # If all columns are ids, the kind of model refuses them.
    named = [name for name in there if not name.startswith("__index_level_")]  # pandas writes it into Parquet
    columns = data.columns or [name for name in named if data.collection is not None or not is_id_column(name)] or there
    for column in columns:
        if column not in there:
            raise RecipeError(f"{section}.columns: no column {column!r}, the data has the columns {', '.join(there)}.")
    return rows.select_columns(columns)


def _open_rows(data: RowsSection, section: str) -> Dataset | IterableDataset:
    if data.source == "files":
        key, builder = f"{section}.files", FILE_TYPES[file_type(data.files[0])]
        if builder == "json" and (rows := _read_triples(data, section)) is not None:
            return rows
        if builder == "csv" and data.collection is not None and is_trec(data.files[0]):
            return concatenate_datasets([read_judgements(key, file) for file in data.files])
        names = names_of_texts if section == "mining.corpus" else names_of_rows
        return load_files(key, {"train": data.files}, names=names, columns=data.columns, streaming=data.streaming)
    return load_table(f"{section}.name", data.name, data.config, data.split or "train", data.streaming)


def names_of_texts(columns: int) -> list[str]:
    """The columns of a collection or of queries, as those of MS MARCO and ColBERT."""
    return ["_id", "text", "title"][:columns]


def _stream(recipe: Recipe, kind: Kind, rows: IterableDataset, first: dict[str, Any]) -> IterableDataset:
    disable_progress_bars()  # one for each batch whose scores are cast
    read = _StreamedRows(recipe, kind, first)
    features = read.checked({name: [value] for name, value in first.items()}, [0]).features
    rows = rows.map(
        read,
        batched=True,
        batch_size=ROWS_AT_ONCE,
        with_indices=True,
        remove_columns=list(first),
        features=Features(features),
    )
    size = recipe.training.per_device_train_batch_size
    with loading("data"):
        found = len(list(rows.take(size)))
    if found < size:
        raise RecipeError(
            f"training.per_device_train_batch_size must be at most {found}, as many rows as the data has, got {size}."
        )
    # An endless epoch: the trainer cannot count epochs of unknown length, and would go on at a wrong row.
    return rows.shuffle(seed=recipe.data.seed, buffer_size=BUFFER).repeat(None)


class _StreamedRows:
    """Checks a batch of rows, with lists of texts made to columns."""

    def __init__(self, recipe: Recipe, kind: Kind, first: dict[str, Any]) -> None:
        self.recipe, self.kind = recipe, kind
        data, self.spread = recipe.data, None
        plain = not any(isinstance(value, (list, dict)) for value in first.values())
        # Of a single column `fit_columns` says what is missing.
        if len(first) > 1 and recipe.loss.name != "distillation" and (not plain or asks_for_negatives(data)):
            self.spread = Spread("data", data, first)

    def __call__(self, batch: dict[str, list], numbers: list[int]) -> dict[str, list]:
        return self.checked(batch, numbers)[:]

    def checked(self, batch: dict[str, list], numbers: list[int]) -> Dataset:
        """The rows of a batch, of which the first has this number in the data."""
        batch = batch if self.spread is None else self.spread(batch, numbers)
        if self.recipe.data.n_ways is not None:
            batch = truncate_lists(batch, self.recipe.data.n_ways)
        try:
            return self.kind.fit_columns(self.recipe, Dataset.from_dict(batch))
        except pa.ArrowException as error:
            raise RecipeError(
                f"data: a column holds values of several types in the rows from number {numbers[0]} on: {first_line(error)}"
            ) from None
        except RecipeError as error:
            raise RecipeError(f"{str(error).rstrip('.')} (in the rows from number {numbers[0]} on).") from None


def _read_triples(data: RowsSection, section: str) -> Dataset | None:
    """Rows of lines ``[qid, pid+, pid-, ...]`` (query, positive, negatives) or ``[qid, [pid, score], ...]`` (query,
    documents, scores), ids as text. None if the first line is no such list.
    """
    key, files = f"{section}.files", data.files
    try:
        with open_text(files[0]) as lines:
            first = json.loads(next(lines, ""))
    except (OSError, ValueError):  # datasets say what is wrong
        return None
    if not isinstance(first, list) or not first or isinstance(first[0], dict):  # an array of rows, perhaps
        return None
    if data.streaming:
        raise RecipeError(f"{section}.streaming does not read lists in JSON lines; set it to false.")
    scored = isinstance(first[-1], list)
    status = [(each.st_size, each.st_mtime_ns, each.st_ctime_ns) for each in map(os.stat, files)]
    arguments = {"key": key, "files": files, "scored": scored, "status": [status]}
    try:
        return Dataset.from_generator(_rows, Features(SCORED if scored else TRIPLES), gen_kwargs=arguments)
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, RecipeError):
            raise error.__cause__ from None
        raise


def _rows(key: str, files: list[str], scored: bool, status: Any) -> Iterator[dict[str, Any]]:
    for file in files:
        with open_text(file) as lines:
            for number, line in enumerate(lines, 1):
                try:
                    query, *documents = json.loads(line)
                    if scored:
                        ids, scores = zip(*documents, strict=True)
                        row = {
                            "query": _id(query),
                            "documents": list(map(_id, ids)),
                            "scores": list(map(float, scores)),
                        }
                    else:
                        positive, *negatives = map(_id, documents)
                        row = {"query": _id(query), "positive": positive, "negatives": negatives}
                except (ValueError, TypeError):
                    wanted = "[qid, [pid, score], ...]" if scored else "[qid, pid, pid, ...]"
                    raise RecipeError(f"{key}: line {number} of {file} must be {wanted}, as the first is.") from None
                yield row


def _id(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise TypeError
    return str(value)
