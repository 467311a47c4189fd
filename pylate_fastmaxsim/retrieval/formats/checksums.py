"""Files with checksums of their chunks: compared when bytes are first used, and added to."""

import os
from array import array
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import ArrayLike

from pylate_fastmaxsim.files.replace import naming

WRITE_AGAIN = "put it back, or write the corpus again with write_corpus"

# Bytes that have one checksum: few, because a document that is read alone costs a chunk or two.
CHUNK = 1 << 16


def chunks(size: int) -> int:
    """Number of checksums of a file of so many bytes; the last is that of the bytes that are left."""
    return -(-size // CHUNK)


class CheckedRows:
    """Rows of ``row`` bytes of a mapped file, with the XXH3 of each chunk.

    Threads may share it: at worst two of them look at the same chunk.
    """

    def __init__(self, file: Path, content: np.ndarray, row: int, checksums: np.ndarray) -> None:
        self._file, self._content, self._row, self._checksums = file, content, row, checksums
        self._seen = np.zeros(len(checksums), bool)

    def require(self, begins: ArrayLike, ends: ArrayLike) -> None:
        """ValueError unless the rows from ``begins`` to before ``ends``, of one run or ``[n]``, are as they were written."""
        first = np.atleast_1d(begins) * self._row // CHUNK
        counts = chunks(np.atleast_1d(ends) * self._row) - first
        numbers = np.repeat(first - (counts.cumsum() - counts), counts) + np.arange(counts.sum())
        for chunk in set(numbers[~self._seen[numbers]].tolist()):
            if not self._is_sound(chunk):
                raise ValueError(f"Corpus: {self._file} is damaged in the bytes from {chunk * CHUNK}; {WRITE_AGAIN}.")
            self._seen[chunk] = True

    def sound_rows(self) -> int:
        """Number of rows before the first damaged chunk."""
        for chunk in range(len(self._checksums)):
            if not self._is_sound(chunk):
                return chunk * CHUNK // self._row
        return len(self._content) // self._row

    def checksums_of(self, rows: int) -> np.ndarray:
        """Checksums of a file that ends after so many of the rows, all of which are sound."""
        size = rows * self._row
        whole = self._checksums[: size // CHUNK]
        left = self._content[size // CHUNK * CHUNK : size]
        return np.append(whole, np.uint64(xxhash.xxh3_64_intdigest(left))) if len(left) else whole

    def _is_sound(self, chunk: int) -> bool:
        found = xxhash.xxh3_64_intdigest(self._content[chunk * CHUNK : (chunk + 1) * CHUNK])
        return found == int(self._checksums[chunk])


class AppendedFile:
    """A data file of a corpus, open for appending: new without ``size``, else with so many bytes that count.

    What lies behind them is cut off; ``checksums`` are those of their chunks. ValueError if the file has fewer bytes, or
    its last chunk, which is gone on with, is damaged.
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
        # Of chunks that are complete, and the bytes of the one that is not.
        self._whole = array("Q", checksums[: size // CHUNK].tolist())
        self._left = self._left_of(size)
        if self._left and xxhash.xxh3_64_intdigest(self._left) != int(checksums[-1]):
            raise ValueError(f"Corpus: {file} is damaged at its end; {WRITE_AGAIN}.")
        self._file.seek(size)

    def append(self, content: memoryview) -> None:
        """Write bytes. OSError if that fails, as on a full disk."""
        left = content
        with naming(self._path):
            while left:
                left = left[self._file.write(left) :]
        content = self._left + content
        whole = len(content) // CHUNK * CHUNK
        for begin in range(0, whole, CHUNK):
            self._whole.append(xxhash.xxh3_64_intdigest(content[begin : begin + CHUNK]))
        self._left = content[whole:]

    def synced(self, size: int) -> np.ndarray:
        """Checksums of the first ``size`` bytes, once these are on the disk."""
        with naming(self._path):
            os.fsync(self._file.fileno())
        found = self._whole[: size // CHUNK]
        # From the file: an interrupted append may have written more than counts.
        if left := self._left_of(size):
            found.append(xxhash.xxh3_64_intdigest(left))
        return np.array(found, np.uint64)

    def _left_of(self, size: int) -> bytes:
        """The bytes behind the last complete chunk."""
        self._file.seek(size // CHUNK * CHUNK)
        left = self._file.read(size % CHUNK)
        self._file.seek(0, os.SEEK_END)
        return left
