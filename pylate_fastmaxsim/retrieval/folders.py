"""Folders of documents that one process writes at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pylate_fastmaxsim.files.lock import LOCK_FILE, locked
from pylate_fastmaxsim.files.replace import SCRATCH, remove_scratch


@contextmanager
def writing(where: str, folder: Path) -> Iterator[None]:
    """Make a folder if need be, and keep other processes from writing it meanwhile; ValueError if one does."""
    folder.mkdir(parents=True, exist_ok=True)
    held = f"{where}: {folder} is being written by another process; wait until it ends, or choose another folder."
    with locked(folder, held):
        remove_scratch(folder)
        yield


def holds_something(folder: Path) -> bool:
    return any(path.name != LOCK_FILE and not path.name.startswith(SCRATCH) for path in folder.iterdir())
