"""Locks that one process at a time holds, and folders that it writes meanwhile."""

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from pylate_fastmaxsim.files.replace import SCRATCH, remove_scratch

logger = logging.getLogger(__name__)

LOCK_FILE = "lock"
# What network file systems without locks answer.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


class HeldError(ValueError):
    """Another process holds a lock."""


@contextmanager
def locked(folder: Path, sentence: str, name: str = LOCK_FILE) -> Iterator[None]:
    """Hold the lock of a folder that is there. HeldError, with the ``sentence``, if another process or thread holds it.

    The lock file stays: a process could wait for the one that is removed, while another makes a new one. The lock is that
    of the operating system, which releases it when a process ends. ValueError if it cannot be taken, as without the
    permission to write, or without file descriptors.
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


@contextmanager
def writing(where: str, folder: Path) -> Iterator[None]:
    """Make a folder if need be, and keep other processes from writing it meanwhile; ValueError if one does."""
    folder.mkdir(parents=True, exist_ok=True)
    held = f"{where}: {folder} is being written by another process; wait until it ends, or choose another folder."
    with locked(folder, held):
        remove_scratch(folder)
        yield


def holds_something(folder: Path) -> bool:
    """True if a folder holds more than a lock and what a killed process has left."""
    return any(path.name != LOCK_FILE and not path.name.startswith(SCRATCH) for path in folder.iterdir())
