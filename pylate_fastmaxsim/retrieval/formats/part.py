"""Documents that lie back to back in arrays on disk."""

from __future__ import annotations

import math
import mmap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pylate_fastmaxsim.cpu.live_tokens import live_tokens
from pylate_fastmaxsim.retrieval.formats.description import DESCRIPTION_FILE, JOURNAL_FILE, Held
from pylate_fastmaxsim.retrieval.formats.format import Arrays, Format, ResidualDocuments
from pylate_fastmaxsim.retrieval.formats.writer import BOUNDS_FILE, file_of


@dataclass(frozen=True, eq=False)
class Part:
    """Documents of one format, on the CPU.

    Parameters
    ----------
    format
        Names the arrays and makes batches of them.
    arrays
        Of each column of the format, all rows: of a mapped file, or in memory.
    bounds
        Where documents begin and end in the rows of tokens, as ``cu_seqlens``: ``[n + 1]``, int64.
    file
        What the bounds are read from, for errors.
    """

    format: Format
    arrays: Arrays
    bounds: Tensor
    file: Path

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
            fitting = int(torch.searchsorted(self.bounds[: end + 1], most, right=True)) - 1
            last = max(begin + 1, fitting)
            bounds = self.bounds[begin : last + 1]
            if bounds[0] < 0 or bounds[-1] > self.tokens or bool((bounds.diff() < 0).any()):
                raise ValueError(
                    f"Corpus: {self.file} must rise from 0 to {self.tokens}, but does not at the documents {begin} to "
                    f"{last}; write the corpus anew with write_corpus."
                )
            yield begin, last
            begin = last

    def views(self, begin: int, end: int) -> tuple[Arrays, Tensor, int]:
        """Arrays of some documents, their ``cu_seqlens``, and the length of the longest."""
        bounds = self.bounds[begin : end + 1]
        first, last = bounds[0].item(), bounds[-1].item()
        per_document = {name for name, column in self.format.columns.items() if column.per_document}
        arrays = {
            name: array[begin:end] if name in per_document else array[first:last] for name, array in self.arrays.items()
        }
        if isinstance(self.format, ResidualDocuments) and last > first:
            # A kernel would read beyond the centroids.
            (lowest, highest), most = map(int, torch.aminmax(arrays["codes"])), len(self.format.codec.centroids) - 1
            if lowest < 0 or highest > most:
                raise ValueError(
                    f"Corpus: codes of the documents of {self.file} must be from 0 to {most}, numbers of centroids, but "
                    f"go from {lowest} to {highest}; write or build them anew."
                )
        return arrays, bounds - first, int(bounds.diff().max())

    def gathered(self, documents: Tensor) -> tuple[Arrays, Tensor]:
        """A copy of the rows of some documents (int64), one after another, and the lengths of the documents."""
        starts = self.bounds[documents]
        lengths = self.bounds[documents + 1] - starts
        rows = live_tokens(starts, lengths, None).row
        arrays = {
            name: _rows(array, documents if self.format.columns[name].per_document else rows)
            for name, array in self.arrays.items()
        }
        return arrays, lengths

    def blocks(self, documents: Tensor, positions: Tensor, tokens_per_block: int) -> tuple[Tensor, ...]:
        """The positions of ascending documents in runs with about that many tokens at most."""
        tokens = (self.bounds[documents + 1] - self.bounds[documents]).cumsum(0)
        sizes = (tokens // tokens_per_block).unique_consecutive(return_counts=True)[1]
        return positions.split(sizes.tolist())


def _rows(array: Tensor, rows: Tensor) -> Tensor:
    # PyTorch has no index_select of fp8 on a CPU.
    is_fp8 = array.dtype == torch.float8_e4m3fn
    taken = (array.view(torch.uint8) if is_fp8 else array).index_select(0, rows)
    return taken.view(array.dtype) if is_fp8 else taken


def mapped_part(folder: Path, held: Held) -> Part:
    """The files of a folder, mapped into memory. ValueError if they are not what its description says."""
    arrays = {
        name: mapped(folder / file_of(name), column.shape(held.documents, held.tokens), column.dtype)
        for name, column in held.format.columns.items()
    }
    file = folder / BOUNDS_FILE
    part = Part(held.format, arrays, mapped(file, (held.documents + 1,), torch.int64), file)
    first, last = part.bounds[0].item(), part.bounds[-1].item()
    if (first, last) != (0, held.tokens):
        raise ValueError(
            f"Corpus: {part.file} must go from 0 to {held.tokens}, as {DESCRIPTION_FILE} has it, but goes from {first} to "
            f"{last}; write the corpus anew with write_corpus."
        )
    return part


def mapped(file: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The numbers of a file without a header. ValueError if it is of another size.

    It may be longer while documents are added, which a journal says.
    """
    count = math.prod(shape)
    size, wanted = file.stat().st_size if file.exists() else 0, count * dtype.itemsize
    if size < wanted or (size > wanted and not (file.parent / JOURNAL_FILE).exists()):
        raise ValueError(f"Corpus: {file} must have {wanted} bytes, as {DESCRIPTION_FILE} has it, but has {size}.")
    if wanted == 0:  # which cannot be mapped
        return torch.empty(shape, dtype=dtype, device="cpu")
    # The mapping of torch.from_file is writable, and refused where it is larger than the memory.
    with open(file, "rb") as opened, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        mapping = mmap.mmap(opened.fileno(), wanted, access=mmap.ACCESS_READ)
        return torch.frombuffer(mapping, dtype=dtype).view(shape)
