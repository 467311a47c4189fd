"""Files that commands read and write: what rows are read from, and what may be replaced."""

import dataclasses
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from pylate_fastmaxsim.files.lock import locked
from pylate_fastmaxsim.files.replace import reason_against_replacing
from pylate_fastmaxsim.recipes.errors import RecipeError

# Files of rows by their endings, with the names that datasets has for their types.
_TYPES = {".jsonl": "json", ".parquet": "parquet", ".json": "json", ".csv": "csv", ".tsv": "csv"}
FILE_TYPES = _TYPES | {f"{ending}.gz": name for ending, name in _TYPES.items() if name != "parquet"}

ENDINGS = ".parquet, .jsonl, .json, .csv or .tsv (these four also with .gz)"


def file_type(file: str | Path) -> str | None:
    """The ending of a file that holds rows, a key of FILE_TYPES; None for other files."""
    return next((ending for ending in FILE_TYPES if str(file).endswith(ending)), None)


def inputs_of(*sections: Any) -> list[Path]:
    """The paths among the keys of a recipe's sections; names on the Hub are among them."""
    found = []
    for section in sections:
        for field in dataclasses.fields(section):
            value = getattr(section, field.name)
            parts = [each for each in (value if isinstance(value, list) else [value]) if dataclasses.is_dataclass(each)]
            if parts:
                found += inputs_of(*parts)
            elif field.metadata.get("path") and value is not None:
                found += map(Path, value if isinstance(value, list) else [value])
    return found


def files_of_collection(folder: str | None) -> list[Path]:
    """The files that are read of a folder in BEIR's layout."""
    if folder is None:
        return []
    return [path for part in ("corpus", "queries", "qrels") for path in Path(folder).expanduser().glob(f"{part}*")]


def make_directory(key: str, directory: Path) -> list[Path]:
    """Make a folder and its parents, and return those that were missing, the innermost first. Errors name ``key``."""
    try:
        missing = [path for path in (directory, *directory.parents) if not path.exists()]
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecipeError(f"{key} {directory} cannot be made: {error.strerror}.") from error
    return missing


@contextmanager
def made_directory(key: str, directory: Path) -> Iterator[list[Path]]:
    """:func:`make_directory`; after an error in the block, those that were missing are removed if they are empty."""
    missing = make_directory(key, directory)
    try:
        yield missing
    except BaseException:
        with suppress(OSError):
            for path in missing:
                path.rmdir()
        raise


def prepare_file(key: str, file: Path, inputs: Iterable[Path | None] = ()) -> None:
    """Make the folder of a file that is written at the end of a command, and refuse it as :func:`require_output`."""
    require_output(key, file, inputs)
    make_directory(key, file.parent)
    if not os.access(file.parent, os.W_OK):
        raise RecipeError(f"{key} {file} cannot be written: {file.parent} is read-only.")


def require_output(key: str, file: Path, inputs: Iterable[Path | None] = ()) -> None:
    """Refuse a file that is no regular one, is one of ``inputs`` or lies in a folder of them. Errors name ``key``."""
    try:
        what = reason_against_replacing(file)
    except OSError as error:  # a name that is too long
        raise RecipeError(f"{key} {file} cannot be written: {error.strerror}.") from None
    if what is not None:
        raise RecipeError(f"{key} {file} cannot be written: it is {what}.")
    for path in inputs:
        if path is None or not path.exists():
            continue
        other = file.parent if path.is_dir() else file
        if other.exists() and path.samefile(other):
            where = f"in {path}, which" if path.is_dir() else "what"
            raise RecipeError(
                f"{key} {file} cannot be written: it is {where} this command reads; choose another place."
            )


@contextmanager
def hold_lock(key: str, file: Path, doing: str) -> Iterator[None]:
    """Hold a lock file, whose folder is made if need be; ``doing`` begins the error where another command holds it.

    The file stays, except after an error in a folder that was made for it and holds nothing else.
    """
    sentence = f"{key}: {doing} by another command; wait until it ends, or choose another folder."
    with made_directory(key, file.parent) as made, ExitStack() as held:
        try:
            held.enter_context(locked(file.parent, sentence, file.name))
        except ValueError as error:
            raise RecipeError(str(error)) from error
        try:
            yield
        except BaseException:
            with suppress(OSError):
                if made and os.listdir(file.parent) == [file.name]:
                    file.unlink()
            raise
