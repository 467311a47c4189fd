"""A lock that one process at a time holds."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

logger = logging.getLogger(__name__)

LOCK_FILE = "lock"
# What network file systems without locks answer.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


class HeldError(ValueError):
    """Another process holds a lock."""


@contextmanager
def locked(folder: Path, sentence: str, name: str = LOCK_FILE) -> Iterator[None]:
    """Hold the lock of a folder that is there.

    The lock file stays: a process could wait for the one that is removed, while another makes a new one. The lock is that
    of the operating system, which releases it when a process ends.

    Parameters
    ----------
    folder
        Holds the lock file.
    sentence
        Of the error, if another process or thread holds the lock.
    name
        Of the lock file.

    Raises
    ------
    HeldError
        It is held.
    ValueError
        The lock cannot be taken, as without the permission to write, or without file descriptors.
    """
    file = folder / name
    lock = FileLock(file)
    try:
        with open(file, "ab") as opened:
            lock.acquire(timeout=0)
            # A folder may be removed together with its lock file, and made again: then this is the lock of nothing.
            if not file.exists() or not os.path.samestat(os.fstat(opened.fileno()), file.stat()):
                lock.release()
                raise HeldError(sentence)
    except Timeout:
        raise HeldError(sentence) from None
    except (NotImplementedError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in _NO_LOCKS:
            raise ValueError(f"{file} cannot be locked ({error.strerror}).") from error
        logger.warning("%s is on a file system without locks: do not start a second process that writes it.", folder)
    try:
        yield
    finally:
        lock.release()
