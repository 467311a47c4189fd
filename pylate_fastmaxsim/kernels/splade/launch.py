"""SPLADE's pooling on CUDA: launches the Triton kernels. Never waits for the device."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from pylate_fastmaxsim._dtypes import float32_precision
from pylate_fastmaxsim._operands import ScoringOperands, SpladeOperands
from pylate_fastmaxsim._winners import no_winner, winner_dtype
from pylate_fastmaxsim.kernels.primitives.live_rows import live_tokens_of
from pylate_fastmaxsim.kernels.runtime.arch import (
    ALL_REGISTERS,
    INPUT_PRECISION,
    architecture,
    arithmetic,
    cdiv,
    launch_options,
    next_power_of_2,
    shrunk,
    table_row,
)
from pylate_fastmaxsim.kernels.runtime.tensors import contiguous, gradient_of, on_device_of
from pylate_fastmaxsim.kernels.splade.maxima import NO_KEY, maxima_kernel, slots_kernel, values_kernel
from pylate_fastmaxsim.kernels.splade.slopes import slopes_kernel, vocabulary_gradient_kernel
from pylate_fastmaxsim.kernels.winner_backward.launch import document_gradient

# Slots whose maximum is taken at once: those of 4 threads of a matrix unit.
_GROUP = 8


class MaximaTiles(NamedTuple):
    """`block_m` vocabulary rows by `block_n` slots, `block_k` numbers of a vector at a time.

    `tiles_together` tiles of slots take turns, so that they share vocabulary rows in L2.
    """

    block_m: int
    block_n: int
    block_k: int
    tiles_together: int
    num_warps: int
    num_stages: int
    max_registers: int | None = ALL_REGISTERS


_MAXIMA = {
    (90, "half"): [(None, MaximaTiles(128, 256, 64, 8, 8, 4))],
    (100, "half"): [(None, MaximaTiles(128, 256, 64, 8, 8, 3))],
    (80, "half"): [(None, MaximaTiles(128, 128, 32, 8, 4, 3))],
    **dict.fromkeys([(86, "half"), (120, "half")], [(None, MaximaTiles(128, 64, 32, 8, 4, 3))]),
    **dict.fromkeys([(90, "bf16x6"), (90, "bf16x3")], [(None, MaximaTiles(128, 64, 32, 8, 8, 3))]),
    **dict.fromkeys(("bf16x6", "bf16x3", "tf32"), [(None, MaximaTiles(64, 64, 16, 8, 4, 2))]),
}


@functools.lru_cache(maxsize=256)
def maxima_tiles(arch: int, kind: str, dim: int) -> MaximaTiles:
    return shrunk(table_row(_MAXIMA, arch, kind, dim), block_k=dim)


def forward(operands: SpladeOperands, want_winners: bool) -> tuple[Tensor, Tensor | None]:
    """Values ``[N, V]`` (float32) and winners ``[N, V]``, which are ``None`` unless wanted."""
    operands = contiguous(operands)
    hidden, weight = operands.hidden, operands.weight
    (num_rows, dim), num_texts = weight.shape, operands.starts.shape[0]
    index_dtype = winner_dtype(operands.max_length)
    size = num_texts, num_rows
    if 0 in (*size, dim, operands.max_length, hidden.shape[0]):
        values = torch.zeros(size, dtype=torch.float32, device=hidden.device)
        winners = torch.full(size, no_winner(index_dtype), dtype=index_dtype, device=hidden.device)
        return values, winners if want_winners else None
    precision = float32_precision(hidden.dtype)
    kind = arithmetic(hidden.dtype, precision)
    tile = maxima_tiles(architecture(hidden.device), kind, dim)
    # Where texts may overlap, each may be as long as the longest.
    longest = cdiv(operands.max_length, _GROUP) * _GROUP
    most_slots = num_texts * longest
    if operands.gapless:
        most_slots = min(most_slots, hidden.shape[0] + (_GROUP - 1) * num_texts)
    num_tiles, row_blocks = cdiv(most_slots, tile.block_n), cdiv(num_rows, tile.block_m)
    values = hidden.new_empty(size, dtype=torch.float32)
    winners = hidden.new_empty(size, dtype=index_dtype) if want_winners else None
    bias = None if operands.bias is None else operands.bias.float()
    smallest = 0 if operands.rectified else NO_KEY.value
    with on_device_of(hidden):
        live_tokens, lengths = live_tokens_of(operands.starts, operands.lengths, operands.keep)
        slot_rows = hidden.new_empty(most_slots, dtype=torch.int32)
        group_texts = hidden.new_empty(most_slots // _GROUP, dtype=torch.int32)
        counts = hidden.new_empty(1, dtype=torch.int32)
        slots_kernel[(num_texts,)](
            operands.starts, lengths, live_tokens, slot_rows, group_texts, counts, num_texts,
            GROUP=_GROUP, BLOCK=256, num_warps=2,
        )  # fmt: skip
        keys = torch.full(size, smallest, dtype=torch.int64, device=hidden.device)
        maxima_kernel[(num_tiles * row_blocks,)](
            hidden, weight, bias, slot_rows, group_texts, counts, keys, num_rows, row_blocks, num_tiles,
            DIM=dim, RECTIFIED=operands.rectified, PRECISION=INPUT_PRECISION[precision], GROUP=_GROUP,
            TILES_TOGETHER=tile.tiles_together, **launch_options(tile),
        )  # fmt: skip
        blocks = cdiv(num_rows, 1024)
        values_kernel[(num_texts * blocks,)](
            keys, slot_rows, operands.starts, values, winners, num_rows, blocks,
            RECTIFIED=operands.rectified, LOGS=operands.logs, SENTINEL=no_winner(index_dtype), BLOCK=1024, num_warps=4,
        )  # fmt: skip
    return values, winners


def backward(
    grad_values: Tensor,
    values: Tensor,
    winners: Tensor,
    operands: SpladeOperands,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``hidden``, ``weight`` and ``bias``; an empty tensor for one that is not needed."""
    operands = contiguous(operands)
    hidden, weight, bias = operands.hidden, operands.weight, operands.bias
    (num_rows, dim), num_texts = weight.shape, operands.starts.shape[0]
    nothing_pooled = 0 in (num_texts, num_rows, dim, operands.max_length, hidden.shape[0])
    grad_hidden = gradient_of(hidden, need_hidden, operands.gapless and not nothing_pooled)
    if not nothing_pooled:
        sentinel = no_winner(winners.dtype)
        with on_device_of(hidden):
            slopes = hidden.new_empty((num_rows, num_texts), dtype=torch.float32)
            blocks = cdiv(num_rows, 64)
            slopes_kernel[(cdiv(num_texts, 32) * blocks,)](
                grad_values.contiguous(), values, winners, slopes, num_texts, num_rows, blocks,
                LOGS=operands.logs, SENTINEL=sentinel, BLOCK_N=32, BLOCK_M=64, num_warps=4,
            )  # fmt: skip
            if need_hidden:
                row = torch.arange(num_rows, dtype=torch.int32, device=hidden.device)
                # Each vocabulary row is a query of one token. Lengths of queries are not read.
                scored = ScoringOperands(
                    weight, row, row, None, hidden, operands.starts, operands.lengths, None, None, None,
                    1, operands.max_length, True, operands.gapless,
                )  # fmt: skip
                document_gradient(slopes, winners, row, scored, grad_hidden)
    # Only now, in the memory that the gradient of hidden states took for its buckets.
    grad_weight = gradient_of(weight, need_weight, not nothing_pooled)
    grad_bias = gradient_of(bias if need_bias else values, need_bias, not nothing_pooled)
    if not nothing_pooled and (need_weight or need_bias):
        block_d = min(1024, next_power_of_2(dim))
        with on_device_of(hidden):
            vocabulary_gradient_kernel[(num_rows, cdiv(dim, block_d) if need_weight else 1)](
                slopes, winners, hidden, operands.starts,
                grad_weight if need_weight else None, grad_bias if need_bias else None, num_texts, num_rows,
                DIM=dim, BLOCK_N=4, BLOCK_D=block_d, num_warps=1,
            )  # fmt: skip
    return grad_hidden, grad_weight, grad_bias
