"""Make folders, and write files that appear under their name only when they are complete."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pylate_fastmaxsim.files.replace import reason_against_replacing, replace_file, require_replaceable
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
        It cannot be made or written, there is something else than a regular file in its place, or it is one of
        ``inputs``, or in a folder that is. The sentence names ``key``.
    """
    require_output(key, file, inputs)
    make_directory(key, file.parent)
    if not os.access(file.parent, os.W_OK):
        raise RecipeError(f"{key} {file} cannot be written: {file.parent} is read-only.")


def require_output(key: str, file: Path, inputs: Iterable[Path | None] = ()) -> None:
    """Refuse a file that a command must not replace; :func:`prepare_file` without making the folder."""
    try:
        what = reason_against_replacing(file)
    except OSError as error:  # a name that is too long
        raise RecipeError(f"{key} {file} cannot be written: {error.strerror}.") from None
    if what is not None:
        raise RecipeError(f"{key} {file} cannot be written: it is {what}.")
    for path in inputs:
        if path is not None and path.exists() and _same(path, file.parent if path.is_dir() else file):
            where = f"in {path}, which" if path.is_dir() else "what"
            raise RecipeError(
                f"{key} {file} cannot be written: it is {where} this command reads; choose another place."
            )


def require_folder(key: str, folder: Path) -> None:
    """Refuse what a folder cannot replace: a file, or a link."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise RecipeError(f"{key}: {folder} must be a folder, or not be there, to be replaced.")


def _same(path: Path, other: Path) -> bool:
    return other.exists() and path.samefile(other)


def files_of_collection(folder: str | None) -> list[Path]:
    """What is read of a folder in BEIR's layout, as inputs for :func:`prepare_file`."""
    if folder is None:
        return []
    return [path for part in ("corpus", "queries", "qrels") for path in Path(folder).expanduser().glob(f"{part}*")]


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
