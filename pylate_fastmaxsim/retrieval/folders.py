"""Folders that one process writes at a time, and files that appear when they are complete."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

SCRATCH = "unfinished"  # last part of the name of a file that is being written
_LOCK_FILE = "lock"


@contextmanager
def writing(where: str, folder: Path) -> Iterator[None]:
    """Make a folder if need be, and keep other processes from writing it meanwhile; ValueError if one does."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / _LOCK_FILE)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(
            f"{where}: {folder} is being written by another process; wait until it ends, or choose another folder."
        ) from None
    except (NotImplementedError, OSError):  # no locks on this file system, or a folder that nothing can be written to
        pass
    try:
        yield
    finally:
        if lock.is_locked:
            # Before the release: afterwards it might be that of another process.
            Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


def holds_something(folder: Path, besides: Collection[str] = ()) -> bool:
    return any(path.name not in (_LOCK_FILE, *besides) for path in folder.iterdir())


def write_atomically(file: Path, content: bytes) -> None:
    scratch = file.with_name(f"{file.name}.{SCRATCH}")
    with open(scratch, "wb") as written:
        written.write(content)
        # A power cut must not leave a file under its name that was never written.
        written.flush()
        os.fsync(written.fileno())
    os.replace(scratch, file)
