"""A folder that one command at a time may write."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from pylate_fastmaxsim.files.lock import locked
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.files.write import make_directory


@contextmanager
def hold_lock(key: str, directory: Path, name: str, sentence: str) -> Iterator[None]:
    """Hold the lock file ``name`` in ``directory``, which is made if need be.

    The file stays, except after an error in a folder that was made for it and holds nothing else.

    Raises
    ------
    RecipeError
        Another command holds the lock (``sentence``), the lock cannot be taken, or the folder cannot be made (names the
        recipe's ``key``).
    """
    made = make_directory(key, directory)
    with ExitStack() as held:
        try:
            held.enter_context(locked(directory, sentence, name))
        except ValueError as error:
            raise RecipeError(str(error)) from error
        try:
            yield
        except BaseException:
            with suppress(OSError):
                if made and os.listdir(directory) == [name]:
                    (directory / name).unlink()
                    for path in made:
                        path.rmdir()
            raise
