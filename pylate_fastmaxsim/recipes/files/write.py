"""Tell a disk that takes no more, of which each library has words of its own, from other errors; write whole files."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pylate_fastmaxsim.recipes.errors import RecipeError

CANNOT_WRITE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}
REFUSED = {errno.EACCES, errno.EPERM}  # which a firewall says as well, but of no file
READING_TOO = REFUSED | {errno.EIO}  # which are said of reading as well

# safetensors puts the number of the system's error into its text; torch.save keeps none at all.
_NUMBERED = re.compile(r"\(os error (\d+)\)")
_TORCH_SAVE = ("inline_container.cc", "PytorchStreamWriter failed")


def write_failure(error: BaseException) -> str | None:
    """Why nothing could be written, or perhaps read, or None where ``error`` is about something else.

    What ``error`` was raised from, or while handling, counts as well: ``datasets`` fails again when it closes the file.

    Examples
    --------
    >>> from pylate_fastmaxsim.recipes.files.write import write_failure
    >>> write_failure(OSError(28, "No space left on device", "model.safetensors"))
    'model.safetensors cannot be written: No space left on device'
    >>> write_failure(PermissionError(13, "Permission denied", "rows.jsonl"))
    'rows.jsonl cannot be read or written: Permission denied'
    >>> write_failure(ValueError("something else"))
    """
    return next((reason for each in _chain(error) if (reason := _reason(each))), None)


def read_failure(error: BaseException) -> str | None:
    """Which file is there and may not be read, or None where ``error`` is about something else."""
    files = (each.filename for each in _chain(error) if isinstance(each, OSError) and each.errno in REFUSED)
    file = next((file for file in files if file and os.path.exists(file) and not os.access(file, os.R_OK)), None)
    return file and f"{file} cannot be read: {os.strerror(errno.EACCES)}"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or error.__context__


def _reason(error: BaseException) -> str | None:
    if isinstance(error, OSError) and error.errno in CANNOT_WRITE - (set() if error.filename else REFUSED):
        return _sentence(error.filename or "a file", error.errno)
    numbered = _NUMBERED.search(str(error))
    if numbered and int(numbered[1]) in CANNOT_WRITE:
        return _sentence("a file", int(numbered[1]))
    if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _TORCH_SAVE):
        return "a checkpoint cannot be written to its end, as on a full disk"
    return None


def _sentence(file: str, number: int) -> str:
    return f"{file} cannot be {'read or written' if number in READING_TOO else 'written'}: {os.strerror(number)}"


def make_directory(key: str, directory: Path) -> list[Path]:
    """Make a folder and those above it, and return those that were not there, the innermost first.

    Raises
    ------
    RecipeError
        Something else is in the way, or the file system has no such folders; it names the recipe's ``key``.
    OSError
        The disk takes no more, see :func:`write_failure`.
    """
    try:
        missing = [path for path in (directory, *directory.parents) if not path.exists()]
        directory.mkdir(parents=True, exist_ok=True)
        return missing
    except OSError as error:
        if error.errno in CANNOT_WRITE - REFUSED:
            raise
        raise RecipeError(f"{key} {directory} cannot be made: {os.strerror(error.errno)}.") from error


def write_whole(file: Path, write: Callable[[str], Any]) -> None:
    """A file that appears under its name only when it is complete."""
    scratch = file.with_name(f"writing-{file.name}")
    write(str(scratch))
    os.replace(scratch, file)


def write_whole_text(file: Path, text: str) -> None:
    """The same of a text."""
    write_whole(file, lambda scratch: Path(scratch).write_text(text, encoding="utf-8"))


def write_whole_folder(folder: Path, write: Callable[[Path], Any]) -> None:
    """The same of a folder, which ``write`` makes: of what stood there before nothing is left, or all if that fails."""
    folder = Path(os.path.realpath(folder))  # a link to another disk remains one
    scratch, before = (folder.with_name(f"{state}-{folder.name}") for state in ("writing", "replaced"))
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        write(scratch)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    # A folder that holds something cannot be replaced in one go, so that for a moment both have other names.
    shutil.rmtree(before, ignore_errors=True)
    if folder.exists():
        os.replace(folder, before)
    try:
        os.replace(scratch, folder)
    except OSError:
        if before.exists():
            os.replace(before, folder)
        raise
    shutil.rmtree(before, ignore_errors=True)
