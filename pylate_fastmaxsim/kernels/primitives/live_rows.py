"""Lists of live tokens, of each sequence or of all sequences in turn, so that kernels see no padding and no mask."""

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from pylate_fastmaxsim.kernels.runtime.cached_launch import kernel
from pylate_fastmaxsim.kernels.runtime.tensors import as_bytes


@kernel()
def live_tokens_kernel(starts, lengths, keep, live_tokens, live_lengths, BLOCK: tl.constexpr):
    """Lists the live tokens of a sequence, in order, at live_tokens[start of the sequence]."""
    sequence = tl.program_id(0)
    start = tl.load(starts + sequence)
    length = tl.load(lengths + sequence).to(tl.int32)
    count = 0
    for first in range(0, length, BLOCK):
        token = first + tl.arange(0, BLOCK)
        live = (tl.load(keep + start + token, mask=token < length, other=0) != 0).to(tl.int32)
        tl.store(live_tokens + start + count + tl.cumsum(live, axis=0) - 1, token, mask=live > 0)
        count += tl.sum(live, axis=0)
    tl.store(live_lengths + sequence, count)


@kernel()
def live_rows_kernel(starts, live_tokens, offsets, rows, BLOCK: tl.constexpr):
    """rows[offsets[n] : offsets[n + 1]] = rows of the live tokens of sequence n, in order.

    `live_tokens` lists these for each sequence at its start, counted from there; None where all tokens are live.
    """
    sequence = tl.program_id(0)
    start = tl.load(starts + sequence)
    begin = tl.load(offsets + sequence)
    count = (tl.load(offsets + sequence + 1) - begin).to(tl.int32)
    for first in range(0, count, BLOCK):
        index = first + tl.arange(0, BLOCK)
        token = index
        if live_tokens is not None:
            token = tl.load(live_tokens + start + index, mask=index < count, other=0)
        tl.store(rows + begin + index, (start + token).to(tl.int32), mask=index < count)


def live_tokens_of(starts: Tensor, lengths: Tensor, keep: Tensor | None) -> tuple[Tensor | None, Tensor]:
    """Positions of the live tokens of each sequence, ``[T]`` from its start on, or None: all; and their numbers ``[N]``."""
    if keep is None:
        return None, lengths
    live_tokens = torch.empty(keep.shape, dtype=torch.int32, device=keep.device)
    live_lengths = torch.empty(lengths.shape, dtype=torch.int32, device=lengths.device)
    live_tokens_kernel[(starts.shape[0],)](
        starts, lengths, as_bytes(keep), live_tokens, live_lengths, BLOCK=256, num_warps=2
    )
    return live_tokens, live_lengths


class LiveRows(NamedTuple):
    """The rows of the live tokens of a ragged batch, sequence after sequence."""

    rows: Tensor  # [at least offsets[-1]], int32
    offsets: Tensor  # [N + 1] where each sequence begins


def live_rows_of(starts: Tensor, lengths: Tensor, keep: Tensor | None, max_length: int) -> LiveRows:
    device, count = starts.device, len(starts)
    live_tokens, lengths = live_tokens_of(starts, lengths, keep)
    offsets = torch.zeros(count + 1, dtype=torch.int64, device=device)
    torch.cumsum(lengths, 0, out=offsets[1:])
    rows = torch.empty(count * max_length, dtype=torch.int32, device=device)
    live_rows_kernel[(count,)](starts, live_tokens, offsets, rows, BLOCK=256, num_warps=2)
    return LiveRows(rows, offsets)
