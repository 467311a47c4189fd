"""Tables from the Hub, from a copy of a Hub data set on disk, or from plain files, of which .csv and .tsv are read as text."""

import csv
import glob
import gzip
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import yaml
from datasets import Dataset, DatasetDict, Features, IterableDataset, Value, load_dataset, load_dataset_builder
from datasets.exceptions import DatasetGenerationError
from datasets.table import CastError
from huggingface_hub import metadata_load

from pylate_fastmaxsim.recipes.errors import RecipeError, as_recipe_error
from pylate_fastmaxsim.recipes.files import FILE_TYPES, file_type

# What datasets says of a table without rows. For an empty file it raises StopIteration.
NO_ROWS = "corresponds to no data"

# Files that only save_to_disk of datasets writes: for one table, and for several.
SAVED_TO_DISK = (("state.json", "dataset_info.json"), ("dataset_dict.json",))

# What a line of names begins with in files that may come without.
FIRST_NAMES = ("query", "anchor", "question", "qid", "pid", "docid", "id", "_id", "query_id", "document_id", "query-id")

# A line with two of these is one of names as well, in any order.
OTHER_NAMES = ("positive", "negative", "negative_1", "pos", "neg", "text", "title", "passage", "document", "answer")

TABS = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}

# Names of n columns without a line of names.
Names = Callable[[int], list[str]]


def load_table(
    key: str, path: str, subset: str | None = None, split: str | None = None, streaming: bool = False
) -> Dataset | IterableDataset:
    """Load a table from the Hub or from a folder. Without ``split`` it must have exactly one split.

    With ``streaming`` its rows are read as they are needed. Errors name ``key``.
    """
    if not Path(path).is_dir():
        place = f"the subset {subset} of {path}" if subset else path
        return _load(key, place, path, subset, split=split, streaming=streaming)
    _require_readable(key, Path(path))
    with loading(key):
        files = _files_of_folder(path, subset)
    return load_files(key, files, split, streaming=streaming)


def load_files(
    key: str,
    files: dict[str, list[str]],
    split: str | None = "train",
    names: Names | None = None,
    columns: list[str] | None = None,
    streaming: bool = False,
) -> Dataset | IterableDataset:
    """Load a table from files of one type, which are listed by split.

    ``names`` and ``columns`` are those of :func:`~pylate_fastmaxsim.recipes.data.tables.read_options`.
    """
    every = [name for parts in files.values() for name in parts]
    patterns = {name: [glob.escape(part) for part in parts] for name, parts in files.items()}
    # The cache of datasets is keyed by path and modification time, which a copy or an unpacked archive may share with an
    # older file. Size and change time in an option without effect make the key different.
    status = [os.stat(name) for name in every if os.path.exists(name)]
    description = str([(each.st_size, each.st_ctime_ns) for each in status])
    options = {"split": split, "data_files": patterns, "description": description, "streaming": streaming}
    builder = FILE_TYPES[file_type(every[0])]
    if builder == "csv":
        options |= read_options(key, every, names, columns)
    return _load(key, ", ".join(every), builder, **options)


def _load(key: str, place: str, path: str, subset: str | None = None, **options: Any) -> Dataset | IterableDataset:
    try:
        table = load_dataset(path, subset, **options)
    except Exception as error:  # datasets raises its own, the Hub client's and pyarrow's errors alike
        if isinstance(error, DatasetGenerationError) and error.__cause__ is not None:
            error = error.__cause__  # DatasetGenerationError only says that something failed
        if isinstance(error, CastError):
            first = error.requested_column_names
            more = [column for column in error.table_column_names if column not in first]
            raise RecipeError(
                f"{key}: all rows must have the columns of the first ({', '.join(first)}), but some have "
                f"{', '.join(more) or 'others'}."
            ) from error
        if isinstance(error, StopIteration) or NO_ROWS in str(error):
            raise RecipeError(f"{key}: there are no rows in {place}.") from error
        with loading(key):
            raise error
    if isinstance(table, DatasetDict):
        if len(table) > 1:
            raise RecipeError(f"{key}: the data must have one split, but it has {', '.join(table)}.")
        table = next(iter(table.values()))
    return table


def _require_readable(key: str, folder: Path) -> None:
    """Refuse folders written by ``save_to_disk``, of which ``load_dataset`` would read the wrong files."""
    if any(all((folder / name).is_file() for name in names) for names in SAVED_TO_DISK):
        raise RecipeError(
            f"{key}: the folder {folder} was written by save_to_disk of datasets, which is not read here; load it with "
            "load_from_disk and write each table with to_parquet."
        )


def loading(key: str) -> AbstractContextManager[None]:
    """Context in which any error is a RecipeError that says that the value of ``key`` cannot be loaded."""
    # datasets raises its own, the Hub client's and pyarrow's errors alike.
    return as_recipe_error(f"{key} cannot be loaded", (Exception,), named=True)


def _files_of_folder(path: str, subset: str | None) -> dict[str, list[str]]:
    """The files, by split, of a table in a folder.

    The cache of ``datasets`` is keyed by the last name of a folder, so that another folder of that name, or an older
    version of this one, would be returned. For files the key is path and modification time.
    """
    files = load_dataset_builder(path, subset).config.data_files
    builders = {FILE_TYPES.get(file_type(file)) for parts in files.values() for file in parts}
    if len(builders) != 1 or None in builders:
        raise ValueError(f"the files of a table must all end in one of {', '.join(FILE_TYPES)}.")
    return {str(split): list(map(str, parts)) for split, parts in files.items()}


def load_subset(key: str, name: str, subset: str, columns: tuple[str, ...], split: str | None = None) -> Dataset:
    """Load the table ``subset`` of a data set, which must have ``columns``. Errors name ``key``.

    ``name`` is on the Hub, or a folder: a copy of what is on the Hub, with a README.md whose ``configs`` name the subsets,
    or one with a .jsonl or .parquet file named after each subset. Without ``split`` it must have exactly one.
    """
    if not has_plain_files(name):
        return require_columns(key, subset, load_table(key, name, subset, split=split), columns)
    file = next(filter(Path.is_file, (Path(name, f"{subset}{ending}") for ending in FILE_TYPES)), None)
    if file is None:
        _require_readable(key, Path(name))
        raise RecipeError(
            f"{key}: the folder {name} must hold {subset}.jsonl or {subset}.parquet (or {subset} as .json, .csv or .tsv), or "
            "a README.md that names its subsets."
        )
    return require_columns(key, subset, load_files(key, {"train": [str(file)]}), columns)


def has_plain_files(name: str) -> bool:
    """Tell whether a data set is a folder without a README.md that lists subsets, as data sets on the Hub have."""
    folder, card = Path(name), Path(name, "README.md")
    try:
        return folder.is_dir() and not (card.exists() and (metadata_load(card) or {}).get("configs"))
    except (yaml.YAMLError, ValueError, RecursionError):  # a header that is not YAML, which datasets refuse
        return False


def require_columns(key: str, subset: str, table: Dataset, columns: tuple[str, ...]) -> Dataset:
    """Return ``table`` if it has ``columns``; raise RecipeError otherwise."""
    for column in columns:
        if column not in table.column_names:
            raise RecipeError(
                f"{key}: the subset {subset} has no column {column!r}, it has {', '.join(table.column_names)}."
            )
    return table


def require_texts(where: str, table: Dataset, column: str, gaps: bool = False) -> None:
    """Refuse a column that is not text, or has missing texts unless ``gaps``. The error begins with ``where``."""
    if not is_text(table, column):
        raise RecipeError(f"{where} must hold text, but it holds {table.features[column]}.")
    if table.data.column(column).null_count and not gaps:
        raise RecipeError(f"{where} must hold a text in every row, but some have none.")


def is_text(table: Dataset, column: str) -> bool:
    """Tell whether a column has the type of text."""
    return getattr(table.features[column], "dtype", None) in ("string", "large_string")


def require_utf8(where: str, texts: pa.ChunkedArray) -> None:
    """Refuse texts that are not UTF-8, as of a file in Latin-1: Arrow reads any bytes as text.

    Reads the whole column from disk.
    """
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid:
        raise RecipeError(f"{where} must hold text in UTF-8, but some rows do not.") from None


def require_text_columns(dataset: Dataset, columns: list[str], section: str) -> None:
    """Refuse columns that do not hold a text in every row."""
    for column in columns:
        require_texts(f"{section}.columns: {column!r}", dataset, column)
        require_utf8(f"{section}.columns: {column!r}", dataset.data.column(column))


def read_options(key: str, files: list[str], names: Names | None, columns: list[str] | None = None) -> dict[str, Any]:
    """Options by which ``datasets`` reads .csv or .tsv files: every value is text, and an empty one is missing.

    The first line of a .csv names its columns, and that of a .tsv if there are no ``names``. Otherwise it does if it
    begins with one of FIRST_NAMES, has two of these and OTHER_NAMES, or has all of ``columns``; if not, ``names`` of the
    number of columns are theirs. A .tsv has no quotes.
    """
    tabs = ".tsv" in Path(files[0]).suffixes
    firsts = [_first_row(key, file, tabs) for file in files]
    having = [not tabs or names is None or _names_columns(first, columns) for first in firsts]
    if len(set(having)) > 1:
        raise RecipeError(
            f"{key}: the first line must name the columns in all files or in none, but it does in "
            f"{files[having.index(True)]} and not in {files[having.index(False)]}."
        )
    named, first = having[0], firsts[0]
    found = first if named else names(len(first))
    if "" in found or len(set(found)) < len(first):
        raise RecipeError(
            f"{key}: the first line of {files[0]} must name each of its columns once, got {', '.join(first)}."
        )
    options = dict(TABS) if tabs else {}
    if not named:
        options |= {"names": found, "header": None}
    texts = Features(dict.fromkeys(found, Value("string")))
    return options | {"features": texts, "keep_default_na": False, "na_values": [""]}


def _names_columns(first: list[str], columns: list[str] | None) -> bool:
    known = [name.lower() in (*FIRST_NAMES, *OTHER_NAMES) for name in first]
    return first[0].lower() in FIRST_NAMES or sum(known) > 1 or bool(columns and {*columns} <= {*first})


def open_text(file: str) -> IO[str]:
    """Open a file, which may be compressed by gzip."""
    if file.endswith(".gz"):
        return gzip.open(file, "rt", encoding="utf-8-sig", newline="")
    return open(file, encoding="utf-8-sig", newline="")


def _first_row(key: str, file: str, tabs: bool) -> list[str]:
    """The first row, of which the second may have no more values: pandas would take the first as the name of the row."""
    limit = csv.field_size_limit(2**31 - 1)  # by default shorter than a long document
    try:
        with loading(key), open_text(file) as lines:
            rows = csv.reader(lines, **(TABS if tabs else {}))
            first, second = islice(chain(filter(None, rows), [[], []]), 2)
    finally:
        csv.field_size_limit(limit)
    if not first:
        raise RecipeError(f"{key}: there are no rows in {file}.")
    if len(second) > len(first):
        raise RecipeError(
            f"{key}: the first row of {file} has {len(first)} values, but the second has {len(second)}: {', '.join(second)}."
        )
    return first
