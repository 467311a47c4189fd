"""Tables from the Hub, from a copy of a Hub data set on disk, or from plain files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, load_dataset

from pylate_fastmaxsim.recipes.load import FILE_TYPES
from pylate_fastmaxsim.recipes.schema import RecipeError


def load_table(key: str, *arguments: Any, **options: Any) -> Dataset:
    """``datasets.load_dataset``; where it fails, a sentence that names the recipe's ``key``.

    Without ``split`` the data must have one split, which is the one returned.
    """
    try:
        table = load_dataset(*arguments, **options)
    except Exception as error:  # datasets raises its own, the Hub client's and pyarrow's errors alike
        reason = str(error).strip().split("\n")[0]
        raise RecipeError(f"{key} cannot be loaded: {type(error).__name__}: {reason}") from error
    if not isinstance(table, DatasetDict):
        return table
    if len(table) > 1:
        raise RecipeError(f"{key}: {arguments[0]} must have one split, but it has {', '.join(table)}.")
    return next(iter(table.values()))


def load_subset(key: str, name: str, subset: str, columns: tuple[str, ...], split: str | None = None) -> Dataset:
    """One table of a data set that consists of several, which must have ``columns``.

    Parameters
    ----------
    key
        The key of the recipe that gave ``name``.
    name
        On the Hub, or a folder: a copy of what is on the Hub, with its README.md, or one with a .jsonl or
        .parquet file named after each subset.
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
    """Whether a data set is a folder of files rather than laid out as on the Hub."""
    return Path(name).is_dir() and not Path(name, "README.md").exists()


def require_columns(key: str, subset: str, table: Dataset, columns: tuple[str, ...]) -> Dataset:
    """``table``, once it is known to have ``columns``."""
    for column in columns:
        if column not in table.column_names:
            raise RecipeError(
                f"{key}: the subset {subset} has no column {column!r}, it has {', '.join(table.column_names)}."
            )
    return table


def _load_file(key: str, folder: Path, subset: str) -> Dataset:
    for suffix, kind in FILE_TYPES.items():
        if (file := folder / f"{subset}{suffix}").is_file():
            return load_table(key, kind, data_files=str(file), split="train")
    names = " or ".join(f"{subset}{suffix}" for suffix in FILE_TYPES)
    raise RecipeError(f"{key}: the folder {folder} must hold {names}, or a README.md that names its subsets.")
