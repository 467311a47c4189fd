"""A folder that one command at a time may write."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.files.write import make_directory

logger = logging.getLogger(__name__)

# What network file systems without locks answer.
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


@contextmanager
def hold_lock(key: str, directory: Path, name: str, sentence: str) -> Iterator[None]:
    """Hold the lock file ``name`` in ``directory``, which is made if need be.

    The end removes the lock file, and those folders made for it that are still empty.

    Raises
    ------
    RecipeError
        Another command holds the lock (``sentence``), or the folder cannot be made (names the recipe's ``key``).
    """
    made = make_directory(key, directory)
    lock = FileLock(directory / name)
    try:
        _take(lock, sentence)
        yield
    finally:
        if lock.is_locked:
            # Before the release: afterwards it might be the file of another command.
            Path(lock.lock_file).unlink(missing_ok=True)
        for path in made:
            with suppress(OSError):
                path.rmdir()
        lock.release()


def _take(lock: FileLock, sentence: str) -> None:
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise RecipeError(sentence) from None
    except (NotImplementedError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in NO_LOCKS:
            raise
        Path(lock.lock_file).unlink(missing_ok=True)
        logger.warning(
            "%s is on a file system without locks: do not start a second command that writes it.",
            Path(lock.lock_file).parent,
        )
