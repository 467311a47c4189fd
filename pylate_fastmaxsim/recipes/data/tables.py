"""Tables from the Hub, from a copy of a Hub data set on disk, or from plain files."""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import yaml
from datasets import (
    Dataset,
    DatasetDict,
    IterableDataset,
    load_dataset,
    load_dataset_builder,
)
from datasets.exceptions import DatasetGenerationError
from datasets.table import CastError
from huggingface_hub import metadata_load

from pylate_fastmaxsim.recipes.data.delimited import Names, read_options
from pylate_fastmaxsim.recipes.errors import RecipeError, first_line
from pylate_fastmaxsim.recipes.files import FILE_TYPES, file_type

# What datasets says of a table without rows. For an empty file it raises StopIteration.
NO_ROWS = "corresponds to no data"

# Files that only save_to_disk of datasets writes: for one table, and for several.
SAVED_TO_DISK = (("state.json", "dataset_info.json"), ("dataset_dict.json",))


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
    try:
        files = _files_of_folder(path, subset)
    except Exception as error:  # as in _load
        raise table_failure(key, error) from error
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

    ``names`` and ``columns`` are those of :func:`~pylate_fastmaxsim.recipes.data.delimited.read_options`.
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
        raise table_failure(key, error) from error
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


def table_failure(key: str, error: Exception) -> RecipeError:
    """A RecipeError for an error that a library raised while it loaded the value of ``key``."""
    return RecipeError(f"{key} cannot be loaded: {type(error).__name__}: {first_line(error)}")


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
    plain = has_plain_files(name)
    table = _load_file(key, Path(name), subset) if plain else load_table(key, name, subset, split=split)
    return require_columns(key, subset, table, columns)


def has_plain_files(name: str) -> bool:
    """Tell whether a data set is a folder without a README.md that lists subsets, as data sets on the Hub have."""
    folder = Path(name)
    return folder.is_dir() and not _names_subsets(folder / "README.md")


def _names_subsets(card: Path) -> bool:
    """Tell whether the header of a README.md has ``configs``; one that is not YAML is left for ``datasets`` to refuse."""
    try:
        return card.exists() and bool((metadata_load(card) or {}).get("configs"))
    except (yaml.YAMLError, ValueError, RecursionError):
        return True


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


def _load_file(key: str, folder: Path, subset: str) -> Dataset:
    for file in filter(Path.is_file, (folder / f"{subset}{ending}" for ending in FILE_TYPES)):
        return load_files(key, {"train": [str(file)]})
    _require_readable(key, folder)
    raise RecipeError(
        f"{key}: the folder {folder} must hold {subset}.jsonl or {subset}.parquet (or {subset} as .json, .csv or .tsv), or "
        "a README.md that names its subsets."
    )
