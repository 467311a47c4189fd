"""Documents that lie back to back in arrays on disk."""

import mmap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from pylate_fastmaxsim.cpu.live_tokens import live_tokens
from pylate_fastmaxsim.files.record import read_again_if_replaced
from pylate_fastmaxsim.retrieval.formats.checksums import WRITE_AGAIN, CheckedRows
from pylate_fastmaxsim.retrieval.formats.description import DESCRIPTION_FILE, Held, file_of, folders, read
from pylate_fastmaxsim.retrieval.formats.format import Arrays, Format
from pylate_fastmaxsim.retrieval.ids import Id, from_lines

# Of what is read to be looked at only.
_TOKENS_AT_ONCE = 1 << 20


@dataclass(frozen=True, eq=False)
class Part:
    """Documents of one format, on the CPU."""

    format: Format
    arrays: Arrays  # of each column all rows: of a mapped file, or in memory
    bounds: Tensor  # of documents in the rows of tokens, as cu_seqlens: [n + 1], int64
    tokens: int
    file: Path  # of the bounds, for errors
    # Of mapped files, by column or "bounds": every row goes through it before it is handed on.
    checked: dict[str, CheckedRows] = field(default_factory=dict)
    ids: Tensor | None = None  # of an index, its file of ids, uint8

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def cuts(self, tokens_per_batch: int, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """First document and the one after the last of each batch of the documents ``begin`` to ``end``."""
        while begin < end:
            # At most all tokens, so that the sum fits 64 bits.
            most = self.bounds[begin] + min(tokens_per_batch, self.tokens)
            fitting = begin + int(torch.searchsorted(self.bounds[begin : end + 1], most, right=True)) - 1
            last = max(begin + 1, fitting)
            # Only now, so that no more bounds are read than are used.
            self._require("bounds", begin, last + 1)
            yield begin, last
            begin = last

    def views(self, begin: int, end: int) -> tuple[Arrays, Tensor, int]:
        """Arrays of the documents of a cut, their ``cu_seqlens``, and the length of the longest."""
        bounds = self.bounds[begin : end + 1]
        first, last = bounds[0].item(), bounds[-1].item()
        arrays = {}
        for name, column in self.format.columns.items():
            rows = (begin, end) if column.per_document else (first, last)
            self._require(name, *rows)
            arrays[name] = self.arrays[name][slice(*rows)]
        self._require_codes(arrays)
        return arrays, bounds - first, int(bounds.diff().max())

    def gathered(self, documents: Tensor) -> tuple[Arrays, Tensor]:
        """A copy of the rows of some documents (int64), one after another, and the lengths of the documents."""
        starts, ends = self.bounds_of(documents)
        rows = live_tokens(starts, ends - starts, None).row
        arrays = {}
        for name, column in self.format.columns.items():
            self._require(name, *((documents, documents + 1) if column.per_document else (starts, ends)))
            arrays[name] = _rows(self.arrays[name], documents if column.per_document else rows)
        self._require_codes(arrays)
        return arrays, ends - starts

    def verify(self) -> None:
        """Read all that was not read before. ValueError if something is damaged."""
        for begin, end in self.cuts(_TOKENS_AT_ONCE, 0, len(self)):
            self.views(begin, end)
        if self.ids is not None:
            self.read_ids()

    def read_ids(self) -> list[Id]:
        """The ids of an index, by position."""
        self._require("ids", 0, len(self.ids))
        return from_lines(self.ids)

    def bounds_of(self, documents: Tensor) -> tuple[Tensor, Tensor]:
        """First row of tokens of some documents, and the one behind the last."""
        self._require("bounds", documents, documents + 2)
        return self.bounds[documents], self.bounds[documents + 1]

    def _require(self, name: str, begins: Tensor | int, ends: Tensor | int) -> None:
        if name in self.checked:
            self.checked[name].require(begins, ends)

    def _require_codes(self, arrays: Arrays) -> None:
        """A kernel would read beyond the centroids."""
        if self.format.codec is not None and len(arrays["codes"]):
            (lowest, highest), most = map(int, torch.aminmax(arrays["codes"])), len(self.format.codec.centroids) - 1
            if lowest < 0 or highest > most:
                raise ValueError(
                    f"Corpus: codes of the documents of {self.file} must be from 0 to {most}, numbers of centroids, but "
                    f"go from {lowest} to {highest}; write or build them anew."
                )


def _rows(array: Tensor, rows: Tensor) -> Tensor:
    # PyTorch has no index_select of fp8 on a CPU.
    is_fp8 = array.dtype == torch.float8_e4m3fn
    taken = (array.view(torch.uint8) if is_fp8 else array).index_select(0, rows)
    return taken.view(array.dtype) if is_fp8 else taken


def mapped_part(folder: Path, held: Held) -> Part:
    """The files of a folder, mapped into memory. ValueError if they are shorter than its description says."""
    sizes, checksums = held.sizes, held.checksums_by_column
    arrays, checks = {}, {}
    for name, column in held.columns.items():
        file = folder / file_of(name)
        content = _mapped(file, sizes[name])
        arrays[name] = content.view(column.dtype).view(column.shape(held.documents, held.tokens))
        row = column.dtype.itemsize * (column.width or 1)
        checks[name] = CheckedRows(file, content.numpy(), row, checksums[name])
    ids, file = None, folder / file_of("ids")
    if held.ids is not None:
        ids = _mapped(file, held.ids)
        checks["ids"] = CheckedRows(file, ids.numpy(), 1, checksums["ids"])
    return Part(held.format, arrays, arrays.pop("bounds"), held.tokens, folder / file_of("bounds"), checks, ids)


def _mapped(file: Path, size: int) -> Tensor:
    """The first bytes of a file, uint8. ValueError if there are fewer.

    It may be longer while documents are added, and when that was interrupted.
    """
    if size == 0:  # which cannot be mapped
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    try:
        # The mapping of torch.from_file is writable, and refused where it is larger than the memory.
        with open(file, "rb", buffering=0) as opened, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            return torch.frombuffer(mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_READ), dtype=torch.uint8)
    except FileNotFoundError:
        reason = "is missing"
    except ValueError:  # of mmap
        reason = f"must have at least {size} bytes, but has {file.stat().st_size}"
    raise ValueError(f"Corpus: {file} {reason}; {WRITE_AGAIN}.")


def open_parts(folder: Path) -> list[Part]:
    """The documents of a folder, of all ranks if it is of several. ValueError if they are not complete."""
    if (part := _opened(folder)) is not None:
        return [part]
    parts: list[Part] = []
    for part in map(_opened, folders(folder)):
        first = parts[0].format if parts else part.format
        if part.format.codec and first.codec and part.format.codec.checksum == first.codec.checksum:
            part = replace(part, format=first)  # so that a device holds it once
        parts.append(part)
    return parts


def _opened(folder: Path) -> Part | None:
    """The corpus of a folder; None if it has none."""

    def opened() -> Part | None:
        if (held := read(folder)) is None:
            return None
        return mapped_part(folder, held)

    return read_again_if_replaced(folder / DESCRIPTION_FILE, opened)
