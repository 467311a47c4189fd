"""The live tokens of a ragged batch as lists, and how to cut these into blocks. Waits for the device."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Live(NamedTuple):
    """The live tokens of a ragged batch, sequence after sequence."""

    row: Tensor  # [n] row of `values`
    position: Tensor  # [n] row counted from the start of the sequence
    sequence: Tensor  # [n]
    count: Tensor  # [N] live tokens of each sequence
    first: Tensor  # [N] where the sequence begins in the three lists


def live_tokens(starts: Tensor, lengths: Tensor, keep: Tensor | None) -> Live:
    """List the tokens that count, sequence after sequence."""
    sequence = torch.repeat_interleave(torch.arange(len(starts), device=starts.device), lengths)
    position = torch.arange(len(sequence), device=starts.device) - (lengths.cumsum(0) - lengths)[sequence]
    row = starts[sequence] + position
    if keep is not None:
        kept = keep[row]
        row, position, sequence = row[kept], position[kept], sequence[kept]
    count = torch.bincount(sequence, minlength=len(starts))
    return Live(row, position, sequence, count, count.cumsum(0) - count)


def rows_of(live: Live, sequences: Tensor) -> Tensor:
    """Rows of the live tokens of ``sequences``, in that order."""
    count = live.count[sequences]
    begin = torch.repeat_interleave(live.first[sequences] - (count.cumsum(0) - count), count)
    return live.row[begin + torch.arange(len(begin), device=begin.device)]


def split_prefixes(prefixes: list[int], limit: int) -> Iterator[list[int]]:
    """Cut ``prefixes`` into runs that sum to at most ``limit``, or are of one element."""
    run, total = [], 0
    for prefix in prefixes:
        if run and total + prefix > limit:
            yield run
            run, total = [], 0
        run.append(prefix)
        total += prefix
    if run:
        yield run
