"""Make folders, and write files that appear under their name only when they are complete."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pylate_fastmaxsim.files.replace import in_the_way, replace_file, require_replaceable
from pylate_fastmaxsim.recipes.errors import RecipeError


def make_directory(key: str, directory: Path) -> list[Path]:
    """Make a folder and its parents, and return those that were missing, the innermost first.

    Raises
    ------
    RecipeError
        The folder cannot be made. The sentence names the recipe's ``key``.
    """
    try:
        missing = [path for path in (directory, *directory.parents) if not path.exists()]
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecipeError(f"{key} {directory} cannot be made: {error.strerror}.") from error
    return missing


def prepare_file(key: str, file: Path, inputs: Iterable[Path | None] = ()) -> None:
    """Make the folder of a file that is written at the end of a command.

    Raises
    ------
    RecipeError
        It cannot be made or written, there is something else than a regular file in its place, or the command reads it,
        as one of ``inputs``. The sentence names ``key``.
    """
    make_directory(key, file.parent)
    try:
        if (what := in_the_way(file)) is not None:
            raise RecipeError(f"{key} {file} cannot be written: it is {what}.")
    except OSError as error:  # a name that is too long
        raise RecipeError(f"{key} {file} cannot be written: {error.strerror}.") from None
    if not os.access(file.parent, os.W_OK):
        raise RecipeError(f"{key} {file} cannot be written: {file.parent} is read-only.")
    if file.exists() and any(path is not None and path.exists() and path.samefile(file) for path in inputs):
        raise RecipeError(f"{key} {file} is read by this command; choose another file.")


def files_of_collection(folder: str | Path | None) -> list[Path]:
    """What is read of a folder in BEIR's layout, as inputs for :func:`prepare_file`."""
    found = Path(folder or "")
    return (
        []
        if folder is None
        else [found / "corpus.jsonl", found / "queries.jsonl", *found.glob("qrels*"), *found.glob("qrels/*")]
    )


def write_atomically(file: Path, content: bytes | Callable[[str], Any]) -> None:
    """:func:`~pylate_fastmaxsim.files.replace.replace_file`, with RecipeError where it cannot be replaced."""
    try:
        require_replaceable(file)
    except ValueError as error:
        raise RecipeError(str(error)) from None
    replace_file(file, content)


def write_text_atomically(file: Path, text: str) -> None:
    """The same for a text."""
    write_atomically(file, text.encode())
