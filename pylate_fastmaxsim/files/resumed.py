"""Folders that one call writes file after file, and that the same call goes on with after it was killed."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pylate_fastmaxsim.files.lock import locked
from pylate_fastmaxsim.files.record import read_record, write_record
from pylate_fastmaxsim.files.replace import remove_scratch

# What reads folders of Parquet passes over names that begin so.
RECORD_FILE = "_written.json"
LOCK_FILE = "_lock"
FORMAT = "pylate-fastmaxsim written 1"


@contextmanager
def resumed(where: str, folder: Path, source: Any) -> Iterator[bool]:
    """Hold the lock of a folder, made if need be, of which a record keeps what it is written from: ``source``, as in JSON.

    The value is True where an earlier call has written everything; it has once the context ends without an error.
    ValueError if the folder holds something else, or another process writes it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    held = f"{where}: {folder} is being written by another process; wait until it ends, or choose another folder."
    with locked(folder, held, LOCK_FILE):
        remove_scratch(folder, RECORD_FILE)
        try:
            record = read_record(folder / RECORD_FILE, FORMAT)
        except ValueError as error:
            raise ValueError(f"{where}: {error} Choose another folder, or remove this one.") from None
        if record is None and any(path.name != LOCK_FILE for path in folder.iterdir()):
            raise ValueError(f"{where}: {folder} must be empty; choose another folder, or remove what it holds.")
        if record is None:
            record = {"format": FORMAT, "source": source, "finished": False}
            write_record(folder / RECORD_FILE, record)
        if record["source"] != source:
            raise ValueError(
                f"{where}: {folder} was written from something else, or before that was changed; choose another folder, or "
                "remove what it holds."
            )
        remove_scratch(folder)  # not before it is known whose the files are
        yield record["finished"]
        if not record["finished"]:
            write_record(folder / RECORD_FILE, record | {"finished": True})
