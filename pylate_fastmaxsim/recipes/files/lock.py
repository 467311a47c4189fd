"""A folder that one command at a time may write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pylate_fastmaxsim.files.lock import locked
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.files.write import make_directory


@contextmanager
def hold_lock(key: str, directory: Path, name: str, sentence: str) -> Iterator[None]:
    """Hold the lock file ``name`` in ``directory``, which is made if need be; the file stays.

    Raises
    ------
    RecipeError
        Another command holds the lock (``sentence``), the lock cannot be taken, or the folder cannot be made (names the
        recipe's ``key``).
    """
    make_directory(key, directory)
    lock = locked(directory, sentence, name)
    try:
        lock.__enter__()
    except ValueError as error:
        raise RecipeError(str(error)) from error
    try:
        yield
    finally:
        lock.__exit__(None, None, None)
