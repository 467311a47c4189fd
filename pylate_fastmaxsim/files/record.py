"""Descriptions of folders, in JSON, that know when they are damaged, and checksums of what they describe."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from pylate_fastmaxsim.files.replace import replace_file

_CHECKSUM = "checksum"
Read = TypeVar("Read")


def checksum(content: Any) -> str:
    """XXH3 of bytes, or of anything that has their buffer: 64 bits, as 16 digits. It is as fast as memory is read."""
    return xxhash.xxh3_64_hexdigest(content)


def write_record(file: Path, values: dict[str, Any]) -> None:
    """Replace a description by one that holds ``values`` and their checksum."""
    replace_file(file, (json.dumps(values | {_CHECKSUM: _of(values)}) + "\n").encode())


def read_record(file: Path, format: str | None = None) -> dict[str, Any] | None:
    """Read what :func:`write_record` wrote; None if there is no such file.

    ValueError if it is damaged, or of something else: of another ``"format"`` than the given one.
    """
    try:
        values = json.loads(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, RecursionError):
        values = None
    sound = isinstance(values, dict) and values.pop(_CHECKSUM, None) == _of(values)
    if not sound or format not in (None, values.get("format")):
        raise ValueError(f"{file} is damaged, or of another release.")
    return values


def read_again_if_replaced(file: Path, read: Callable[[], Read]) -> Read:
    """Call ``read``, which reads a description and the files that it names, and return what it returns.

    A writer may have removed these since the description was read. So where ``read`` raises ValueError, it is called again
    as long as there is another description than after the last error.
    """
    before = None
    while True:
        try:
            return read()
        except ValueError:
            if before == (before := _content(file)):
                raise


def _of(values: dict[str, Any]) -> str:
    return checksum(json.dumps(values).encode())


def _content(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except OSError:
        return None
