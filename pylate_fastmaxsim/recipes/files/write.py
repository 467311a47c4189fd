"""Make folders, and write files and folders that appear under their name only when they are complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def prepare_file(key: str, file: Path) -> None:
    """Make the folder of a file that is written at the end of a command.

    Raises
    ------
    RecipeError
        It cannot be made or written, or there is a folder in the place of the file. The sentence names ``key``.
    """
    make_directory(key, file.parent)
    if file.is_dir() or not os.access(file.parent, os.W_OK):
        reason = "it is a folder" if file.is_dir() else f"{file.parent} is read-only"
        raise RecipeError(f"{key} {file} cannot be written: {reason}.")


def write_atomically(file: Path, write: Callable[[str], Any]) -> None:
    """Write a file: ``write`` gets a scratch name, which becomes ``file`` when it returns."""
    scratch = file.with_name(f"writing-{file.name}")
    write(str(scratch))
    os.replace(scratch, file)


def write_text_atomically(file: Path, text: str) -> None:
    """The same for a text."""
    write_atomically(file, lambda scratch: Path(scratch).write_text(text, encoding="utf-8"))


def replace_folder(folder: Path, write: Callable[[Path], Any]) -> None:
    """Replace a folder by the one that ``write`` makes under a scratch name; if ``write`` fails, nothing changes."""
    scratch = folder.with_name(f"writing-{folder.name}")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        write(scratch)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(scratch, folder)
