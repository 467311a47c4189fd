"""Tables from the Hub, from a copy of a Hub data set on disk, or from plain files."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml
from datasets import (
    Dataset,
    DatasetDict,
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
    load_dataset,
    load_dataset_builder,
)
from datasets.exceptions import DatasetGenerationError
from datasets.table import CastError
from huggingface_hub.repocard import REGEX_YAML_BLOCK

from pylate_fastmaxsim.recipes.config.schema import FILE_TYPES
from pylate_fastmaxsim.recipes.errors import RecipeError, first_line
from pylate_fastmaxsim.recipes.files.write import read_failure, write_failure

# What datasets says of a table that has columns and no rows; of a file without a line it says StopIteration.
NO_ROWS = "corresponds to no data"
# What pyarrow says where datasets reads as many rows at once as the first group of a Parquet file has.
NO_ROWS_IN_GROUP = "BatchSize must be greater than 0"

# What only save_to_disk of datasets writes into the folder of a table, and of several.
SAVED_TO_DISK = (("state.json", "dataset_info.json"), ("dataset_dict.json",))

FOLDER_FILE_TYPES = {**FILE_TYPES, ".json": "json", ".csv": "csv"}


def load_table(key: str, path: str, subset: str | None = None, **options: Any) -> Dataset:
    """``datasets.load_dataset``; where it fails, a sentence that names the recipe's ``key``.

    Without ``split`` the data must have one split, which is the one returned.
    """
    # Of files that are named, the path is their kind, of which a folder may have the name.
    is_folder = "data_files" not in options and Path(path).is_dir()
    if is_folder:
        _require_files(key, Path(path))
    try:
        if is_folder:
            path, subset, options = _files_of_folder(path, subset, options)
        with progress_shown():
            table = load_dataset(path, subset, **_literal(options), **_told_apart(options.get("data_files")))
    except Exception as error:  # datasets raises its own, the Hub client's and pyarrow's errors alike
        if reason := read_failure(error):
            raise RecipeError(f"{key}: {reason}.") from error
        if write_failure(error):
            raise
        if isinstance(error, DatasetGenerationError) and error.__cause__ is not None:
            error = error.__cause__  # which says what, where datasets only says that
        if isinstance(error, CastError):
            first = error.requested_column_names
            more = [column for column in error.table_column_names if column not in first]
            place = _file_with(more, path, options.get("data_files")) or "some row"
            raise RecipeError(
                f"{key}: all rows must have the columns of the first ({', '.join(first)}), but {place} has "
                f"{', '.join(more) or 'others'}."
            ) from error
        if isinstance(error, StopIteration) or NO_ROWS in str(error):
            raise RecipeError(f"{key}: there are no rows in {_place(path, subset, options)}.") from error
        if NO_ROWS_IN_GROUP in str(error) and (file := _parquet_without_rows(_flat(options.get("data_files")))):
            raise RecipeError(f"{key}: there are no rows in {file}.") from error
        raise table_failure(key, error) from error
    if isinstance(table, DatasetDict):
        if len(table) > 1:
            raise RecipeError(f"{key}: the data must have one split, but it has {', '.join(table)}.")
        table = next(iter(table.values()))
    return table


def _require_files(key: str, folder: Path) -> None:
    """Refuse what ``datasets`` writes for itself, of which it would load the files of no table, and brackets."""
    if any(all((folder / name).is_file() for name in names) for names in SAVED_TO_DISK):
        raise RecipeError(
            f"{key}: the folder {folder} was written by save_to_disk of datasets, which is not read here; load it with "
            "load_from_disk and write each table with to_parquet."
        )
    if _looks_like_a_pattern(folder):
        raise RecipeError(
            f"{key}: the path of the folder {folder} must have no [, which datasets takes for the begin of a pattern; "
            "rename it."
        )


def _looks_like_a_pattern(folder: Path) -> bool:
    """Whether ``datasets`` finds no file in a folder, whose path it cannot be given with brackets escaped."""
    return "[" in str(folder.resolve())


def _file_with(columns: list[str], kind: str, files: Any) -> str | None:
    """The first of the files that begins with a row that has some of these columns."""
    for file in _flat(files):
        with suppress(StopIteration):  # an empty file
            rows = load_dataset(kind, split="train", streaming=True, **_literal({"data_files": file}))
            if not set(columns).isdisjoint(next(iter(rows), ())):
                return file
    return None


def _parquet_without_rows(files: list[str]) -> str | None:
    """The first of these files that is a table without rows."""
    for file in files:
        with suppress(OSError, pa.ArrowInvalid):  # one on the Hub
            if pq.read_metadata(file).num_rows == 0:
                return file
    return None


def _flat(files: str | list[str] | dict[str, list[str]] | None) -> list[str]:
    """All that ``data_files`` names."""
    if isinstance(files, dict):
        return [file for parts in files.values() for file in parts]
    return [files] if isinstance(files, str) else files or []


def _literal(options: dict[str, Any]) -> dict[str, Any]:
    """With the names of files as patterns that match nothing else: datasets takes brackets for such."""

    def escaped(files: str | list[str]) -> str | list[str]:
        return glob.escape(files) if isinstance(files, str) else [glob.escape(file) for file in files]

    files = options.get("data_files")
    if files is None:
        return options
    if isinstance(files, dict):
        return {**options, "data_files": {split: escaped(parts) for split, parts in files.items()}}
    return {**options, "data_files": escaped(files)}


def _told_apart(files: Any) -> dict[str, str]:
    """An option of no effect in which files differ that have one path and one time.

    ``datasets`` keeps what it made of a file by these two, and would return earlier rows where times are kept or are
    all the same, as of a copy with its times, an archive or a bucket.
    """
    status = [os.stat(file) for file in _flat(files) if os.path.exists(file)]  # not those on the Hub
    return {"description": str([(each.st_size, each.st_ctime_ns) for each in status])} if status else {}


def table_failure(key: str, error: Exception) -> RecipeError:
    """The sentence for an error of the libraries that load what ``key`` names."""
    return RecipeError(f"{key} cannot be loaded: {type(error).__name__}: {first_line(error)}")


def _place(path: str, subset: str | None, options: dict[str, Any]) -> str:
    if files := _flat(options.get("data_files")):
        return ", ".join(files)
    return f"the subset {subset} of {path}" if subset else path


@contextmanager
def progress_shown() -> Iterator[None]:
    """Let ``datasets`` show what it does, on a terminal: what takes minutes for a large corpus."""
    hidden = are_progress_bars_disabled()
    if not hidden or not sys.stderr.isatty():
        yield
        return
    enable_progress_bars()
    try:
        yield
    finally:
        disable_progress_bars()


def _files_of_folder(path: str, subset: str | None, options: dict[str, Any]) -> tuple[str, None, dict[str, Any]]:
    """The same table by its files.

    ``datasets`` keeps what it made of a folder under the folder's last name only, and would return the rows of
    another folder of that name, or of this one before it was written anew. Of files it looks at path and time.
    """
    files = load_dataset_builder(path, subset).config.data_files
    kinds = {FOLDER_FILE_TYPES.get(Path(file).suffix) for parts in files.values() for file in parts}
    if len(kinds) != 1 or None in kinds:
        raise ValueError(f"the files of a table must all end in one of {', '.join(FOLDER_FILE_TYPES)}.")
    data_files = {str(split): list(map(str, parts)) for split, parts in files.items()}
    return kinds.pop(), None, {**options, "data_files": data_files}


def load_subset(key: str, name: str, subset: str, columns: tuple[str, ...], split: str | None = None) -> Dataset:
    """One table of a data set that consists of several, which must have ``columns``.

    Parameters
    ----------
    key
        The key of the recipe that gave ``name``.
    name
        On the Hub, or a folder: a copy of what is on the Hub, with a README.md whose ``configs`` name the subsets,
        or one with a .jsonl or .parquet file named after each subset.
    subset
        Name of the table.
    columns
        Columns that it must have; it may have more.
    split
        Its split; None takes the only one.
    """
    plain = has_plain_files(name)
    table = _load_file(key, Path(name), subset) if plain else load_table(key, name, subset, split=split)
    return require_columns(key, subset, table, columns)


def has_plain_files(name: str) -> bool:
    """Whether a data set is a folder of files rather than laid out as on the Hub, or can only be read as one."""
    folder = Path(name)
    return folder.is_dir() and (not _names_subsets(folder / "README.md") or _looks_like_a_pattern(folder))


def _names_subsets(card: Path) -> bool:
    """Whether a README.md names the subsets of its folder, which notes of one's own do not.

    One that cannot be read counts as one that does: ``datasets`` says what is wrong with it.
    """
    if not card.exists():
        return False
    try:
        block = REGEX_YAML_BLOCK.search(card.read_text(encoding="utf-8"))
        values = yaml.safe_load(block[2]) if block else None
    except (OSError, ValueError, yaml.YAMLError):
        return True
    return isinstance(values, dict) and bool(values.get("configs"))


def require_columns(key: str, subset: str, table: Dataset, columns: tuple[str, ...]) -> Dataset:
    """``table``, once it is known to have ``columns``."""
    for column in columns:
        if column not in table.column_names:
            raise RecipeError(
                f"{key}: the subset {subset} has no column {column!r}, it has {', '.join(table.column_names)}."
            )
    return table


def require_texts(where: str, table: Dataset, column: str, gaps: bool = False) -> None:
    """Refuse a column that does not hold a text in every row, or with ``gaps`` in some; ``where`` begins the error."""
    if not is_text(table, column):
        raise RecipeError(f"{where} must hold text, but it holds {table.features[column]}.")
    if table.data.column(column).null_count and not gaps:
        raise RecipeError(f"{where} must hold a text in every row, but some have none.")


def is_text(table: Dataset, column: str) -> bool:
    """Whether a column holds texts, as far as its type says."""
    return getattr(table.features[column], "dtype", None) in ("string", "large_string")


def require_utf8(where: str, texts: pa.ChunkedArray) -> None:
    """Refuse texts that Python cannot read: Arrow takes any bytes for text, from JSON and Parquet alike.

    It reads them all, at the speed of the disk.
    """
    before = 0
    for chunk in texts.chunks:
        try:
            chunk.validate(full=True)
        except pa.ArrowInvalid:
            row = next(row for row, text in enumerate(pc.cast(chunk, _bytes_of(chunk.type))) if not _is_utf8(text))
            raise RecipeError(f"{where} must hold text in UTF-8, but row {before + row} does not.") from None
        before += len(chunk)


def _bytes_of(kind: pa.DataType) -> pa.DataType:
    return pa.large_binary() if pa.types.is_large_string(kind) else pa.binary()


def _is_utf8(text: pa.Scalar) -> bool:
    try:
        (text.as_py() or b"").decode()
    except UnicodeDecodeError:
        return False
    return True


def _load_file(key: str, folder: Path, subset: str) -> Dataset:
    if file := _plain_file(folder, subset):
        return load_table(key, FILE_TYPES[file.suffix], data_files=str(file), split="train")
    _require_files(key, folder)
    names = " or ".join(f"{subset}{suffix}" for suffix in FILE_TYPES)
    raise RecipeError(f"{key}: the folder {folder} must hold {names}, or a README.md that names its subsets.")


def _plain_file(folder: Path, subset: str) -> Path | None:
    return next(filter(Path.is_file, (folder / f"{subset}{suffix}" for suffix in FILE_TYPES)), None)


def table_files(folder: str, subset: str | None, split: str) -> list[str]:
    """The files that a table in a folder is loaded from; of a part of a split, or of several, those of all splits."""
    files = _files_of_folder(folder, subset, {})[2]["data_files"]
    return files.get(split) or _flat(files)


def subset_files(folder: str, subset: str, split: str) -> list[str]:
    """The same of what :func:`load_subset` loads."""
    if not has_plain_files(folder):
        return table_files(folder, subset, split)
    file = _plain_file(Path(folder), subset)
    return [str(file)] if file else []
