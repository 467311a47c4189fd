"""Tell a disk that takes no more from every other error: each library has its own way to say so."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pylate_fastmaxsim.recipes.schema import RecipeError

CANNOT_WRITE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}
REFUSED = {errno.EACCES, errno.EPERM}  # which a firewall says as well, but of no file

# safetensors puts the number of the system's error into its text; torch.save keeps none at all.
_NUMBERED = re.compile(r"\(os error (\d+)\)")
_TORCH_SAVE = ("inline_container.cc", "PytorchStreamWriter failed")


def write_failure(error: BaseException) -> str | None:
    """Why nothing could be written, or None where ``error`` is about something else.

    What ``error`` was raised from, or while handling, counts as well: ``datasets`` fails again when it closes the file.

    Examples
    --------
    >>> from pylate_fastmaxsim.recipes.disk import write_failure
    >>> write_failure(OSError(28, "No space left on device", "model.safetensors"))
    'model.safetensors cannot be written: No space left on device'
    >>> write_failure(ValueError("something else"))
    """
    return next((reason for each in _chain(error) if (reason := _reason(each))), None)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or error.__context__


def _reason(error: BaseException) -> str | None:
    if isinstance(error, OSError) and error.errno in CANNOT_WRITE - (set() if error.filename else REFUSED):
        return f"{error.filename or 'a file'} cannot be written: {os.strerror(error.errno)}"
    numbered = _NUMBERED.search(str(error))
    if numbered and int(numbered[1]) in CANNOT_WRITE:
        return f"a file cannot be written: {os.strerror(int(numbered[1]))}"
    if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _TORCH_SAVE):
        return "a checkpoint cannot be written to its end, as on a full disk"
    return None


def make_directory(key: str, directory: Path) -> None:
    """Make a folder and those above it; where one cannot be there at all, a sentence that names the recipe's ``key``.

    Raises
    ------
    RecipeError
        Something else is in the way, or the file system has no such folders.
    OSError
        The disk takes no more, see :func:`write_failure`.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
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
