"""Files whose bytes are compared with checksums when they are first used."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import xxhash
from torch import Tensor

# Bytes that have one checksum: few, because a document that is read alone costs a chunk or two.
CHUNK = 1 << 16


def chunks(size: int) -> int:
    """How many checksums a file of so many bytes has; the last is that of the bytes that are left."""
    return -(-size // CHUNK)


class Checked:
    """Rows of a mapped file. Threads may share it: at worst two of them look at the same chunk.

    Parameters
    ----------
    file
        Its name, for errors.
    content
        Its bytes, uint8.
    row
        Bytes of a row.
    checksums
        XXH3 of 64 bits of each chunk, uint64.
    """

    def __init__(self, file: Path, content: np.ndarray, row: int, checksums: np.ndarray) -> None:
        self._file, self._content, self._row, self._checksums = file, content, row, checksums
        self._seen = np.zeros(len(checksums), bool)

    def require(self, begin: int, end: int) -> None:
        """ValueError unless the rows from ``begin`` to before ``end`` are those that were written."""
        first, last = begin * self._row // CHUNK, chunks(end * self._row)
        self._look_at(first + np.flatnonzero(~self._seen[first:last]))

    def require_runs(self, begins: Tensor, ends: Tensor) -> None:
        """:meth:`require` of several runs of rows, ``[n]``, int64."""
        first, last = begins.numpy() * self._row // CHUNK, chunks(ends.numpy() * self._row)
        # The first chunk of each run, then the second of those that have one, and so on.
        while len(first := first[have_one := first < last]):
            last = last[have_one]
            self._look_at(first[~self._seen[first]])
            first = first + 1

    def sound_rows(self) -> int:
        """How many rows there are before the first damaged chunk."""
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

    def _look_at(self, numbers: np.ndarray) -> None:
        for chunk in set(numbers.tolist()):
            if not self._is_sound(chunk):
                raise ValueError(
                    f"Corpus: {self._file} is damaged in the bytes from {chunk * CHUNK}; put it back, or write the corpus "
                    "again with write_corpus."
                )
            self._seen[chunk] = True

    def _is_sound(self, chunk: int) -> bool:
        found = xxhash.xxh3_64_intdigest(self._content[chunk * CHUNK : (chunk + 1) * CHUNK])
        return found == int(self._checksums[chunk])
