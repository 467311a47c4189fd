"""A file that is appended to, with the checksums of its chunks."""

from __future__ import annotations

import os
from array import array
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import xxhash

from pylate_fastmaxsim.files.replace import naming
from pylate_fastmaxsim.retrieval.formats import checked
from pylate_fastmaxsim.retrieval.formats.description import WRITE_AGAIN


class AppendedFile:
    """A data file of a corpus, open for appending.

    Parameters
    ----------
    file
        New, unless it has ``size``.
    size
        Bytes that count; what lies behind them is cut off. None for a new file.
    checksums
        Of the chunks of these bytes, uint64.
    files
        Closes the file.

    Raises
    ------
    ValueError
        The file has fewer bytes, or its last chunk, which is gone on with, is damaged.
    OSError
        It cannot be opened, or is there already and should be new.
    """

    def __init__(self, file: Path, size: int | None, checksums: np.ndarray, files: ExitStack) -> None:
        self._path = file
        # Without a buffer, which would be written once more when the file is closed after an error.
        self._file = files.enter_context(file.open("x+b" if size is None else "r+b", buffering=0))
        size = size or 0
        found = os.fstat(self._file.fileno()).st_size
        if found < size:
            raise ValueError(f"Corpus: {file} must have at least {size} bytes, but has {found}; {WRITE_AGAIN}.")
        if found > size:
            with naming(file):
                self._file.truncate(size)
                # Before anything is written behind them.
                os.fsync(self._file.fileno())
        # Of chunks that are complete, and of the one that is not, with its bytes so far.
        self._whole = array("Q", checksums[: size // checked.CHUNK].tolist())
        left = self._left_of(size)
        self._last, self._in_last = xxhash.xxh3_64(left), len(left)
        if left and self._last.intdigest() != int(checksums[-1]):
            raise ValueError(f"Corpus: {file} is damaged at its end; {WRITE_AGAIN}.")
        self._file.seek(size)

    def append(self, content: memoryview) -> None:
        """Write bytes. OSError if that fails, as on a full disk."""
        left = content
        with naming(self._path):
            while left:
                left = left[self._file.write(left) :]
        while content:
            part = content[: checked.CHUNK - self._in_last]
            self._last.update(part)
            self._in_last += len(part)
            if self._in_last == checked.CHUNK:
                self._whole.append(self._last.intdigest())
                self._last, self._in_last = xxhash.xxh3_64(), 0
            content = content[len(part) :]

    def synced(self, size: int) -> np.ndarray:
        """Checksums of the first ``size`` bytes, once these are on the disk."""
        with naming(self._path):
            os.fsync(self._file.fileno())
        found = self._whole[: size // checked.CHUNK]
        # Not the running one: an interrupted append may have written more than counts.
        if left := self._left_of(size):
            found.append(xxhash.xxh3_64_intdigest(left))
        return np.array(found, np.uint64)

    def _left_of(self, size: int) -> bytes:
        """The bytes behind the last complete chunk."""
        self._file.seek(size // checked.CHUNK * checked.CHUNK)
        left = self._file.read(size % checked.CHUNK)
        self._file.seek(0, os.SEEK_END)
        return left
