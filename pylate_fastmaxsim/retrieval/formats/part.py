"""Documents that lie back to back in arrays on disk."""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from pylate_fastmaxsim.cpu.live_tokens import live_tokens
from pylate_fastmaxsim.retrieval.formats.checksums import WRITE_AGAIN, CheckedRows
from pylate_fastmaxsim.retrieval.formats.description import BOUNDS_FILE, Held, file_of
from pylate_fastmaxsim.retrieval.formats.format import Arrays, Column, Format

_BOUNDS = Column(torch.int64, per_document=True)
# Of what is read to be looked at only.
_TOKENS_AT_ONCE = 1 << 20


@dataclass(frozen=True, eq=False)
class Part:
    """Documents of one format, on the CPU."""

    format: Format
    arrays: Arrays  # of each column all rows: of a mapped file, or in memory
    bounds: Tensor  # of documents in the rows of tokens, as cu_seqlens: [n + 1], int64
    file: Path  # of the bounds, for errors
    # Of mapped files, by column or "bounds": every row goes through it before it is handed on.
    checked: dict[str, CheckedRows] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def tokens(self) -> int:
        return self.bounds[-1].item()

    def cuts(self, tokens_per_batch: int, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """First document and the one after the last of each batch of the documents ``begin`` to ``end``."""
        while begin < end:
            # At most all tokens, so that the sum fits 64 bits.
            most = self.bounds[begin] + min(tokens_per_batch, self.tokens)
            fitting = begin + int(torch.searchsorted(self.bounds[begin : end + 1], most, right=True)) - 1
            last = max(begin + 1, fitting)
            # Only now, so that no more bounds are read than are used.
            if "bounds" in self.checked:
                self.checked["bounds"].require(begin, last + 1)
            self._require_order(self.bounds[begin:last], self.bounds[begin + 1 : last + 1])
            yield begin, last
            begin = last

    def views(self, begin: int, end: int) -> tuple[Arrays, Tensor, int]:
        """Arrays of the documents of a cut, their ``cu_seqlens``, and the length of the longest."""
        bounds = self.bounds[begin : end + 1]
        first, last = bounds[0].item(), bounds[-1].item()
        arrays = {}
        for name, column in self.format.columns.items():
            rows = (begin, end) if column.per_document else (first, last)
            if name in self.checked:
                self.checked[name].require(*rows)
            arrays[name] = self.arrays[name][slice(*rows)]
        self._require_codes(arrays)
        return arrays, bounds - first, int(bounds.diff().max())

    def gathered(self, documents: Tensor) -> tuple[Arrays, Tensor]:
        """A copy of the rows of some documents (int64), one after another, and the lengths of the documents."""
        starts, ends = self._bounds_of(documents)
        rows = live_tokens(starts, ends - starts, None).row
        arrays = {}
        for name, column in self.format.columns.items():
            if name in self.checked:
                runs = (documents, documents + 1) if column.per_document else (starts, ends)
                self.checked[name].require_runs(*runs)
            arrays[name] = _rows(self.arrays[name], documents if column.per_document else rows)
        self._require_codes(arrays)
        return arrays, ends - starts

    def blocks(self, documents: Tensor, positions: Tensor, tokens_per_block: int) -> tuple[Tensor, ...]:
        """The positions of ascending documents in runs with about that many tokens at most."""
        starts, ends = self._bounds_of(documents)
        sizes = ((ends - starts).cumsum(0) // tokens_per_block).unique_consecutive(return_counts=True)[1]
        return positions.split(sizes.tolist())

    def require_end(self, tokens: int) -> None:
        """ValueError unless the last document ends at so many tokens."""
        if self.tokens != tokens:
            raise ValueError(f"Corpus: {self.file} must end with {tokens}, but ends with {self.tokens}; {WRITE_AGAIN}.")

    def verify(self) -> None:
        """Read all that was not read before. ValueError if something is damaged."""
        for begin, end in self.cuts(_TOKENS_AT_ONCE, 0, len(self)):
            self.views(begin, end)

    def _bounds_of(self, documents: Tensor) -> tuple[Tensor, Tensor]:
        if "bounds" in self.checked:
            self.checked["bounds"].require_runs(documents, documents + 2)
        starts, ends = self.bounds[documents], self.bounds[documents + 1]
        self._require_order(starts, ends)
        return starts, ends

    def _require_order(self, starts: Tensor, ends: Tensor) -> None:
        starts, ends = starts.numpy(), ends.numpy()
        if len(starts) and (starts.min() < 0 or ends.max() > self.tokens or (starts > ends).any()):
            raise ValueError(
                f"Corpus: {self.file} must rise from 0 to {self.tokens}, but does not; write or build it anew."
            )

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
    sizes, checksums = held.sizes, held.checksums_by_file
    arrays, checks = {}, {}

    def add(column: str, file: str, stored: Column, documents: int) -> None:
        content = _mapped(folder / file, sizes[file])
        arrays[column] = content.view(stored.dtype).view(stored.shape(documents, held.tokens))
        checks[column] = CheckedRows(folder / file, content.numpy(), stored.nbytes(1, 1), checksums[file])

    for name, column in held.format.columns.items():
        add(name, file_of(name), column, held.documents)
    add("bounds", BOUNDS_FILE, _BOUNDS, held.documents + 1)
    return Part(held.format, arrays, arrays.pop("bounds"), folder / BOUNDS_FILE, checks)


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
