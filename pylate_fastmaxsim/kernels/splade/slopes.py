"""Gradients of the products that gave the values, and the gradient of the vocabulary rows."""

import triton.language as tl

from pylate_fastmaxsim.kernels.runtime.cached_launch import kernel


@kernel("num_texts", "num_rows", "row_blocks")
def slopes_kernel(
    grad_values,
    values,
    winners,
    slopes,
    num_texts,
    num_rows,
    row_blocks,
    LOGS: tl.constexpr,
    SENTINEL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """slopes[row, text] = grad_values[text, row] * the derivative of log(1 + x), LOGS times; 0 where there is no winner."""
    program = tl.program_id(0)
    text = (program // row_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = (program % row_blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
    here = (text < num_texts)[:, None] & (row < num_rows)[None, :]
    offset = text.to(tl.int64)[:, None] * num_rows + row[None, :]
    won = tl.load(winners + offset, mask=here, other=SENTINEL).to(tl.int32) != SENTINEL
    slope = tl.load(grad_values + offset, mask=won, other=0.0)
    if LOGS > 0:
        value = tl.load(values + offset, mask=won, other=0.0)
        slope *= tl.exp(-value)
        if LOGS == 2:
            slope *= tl.exp(1.0 - tl.exp(value))
    transposed = row.to(tl.int64)[:, None] * num_texts + text[None, :]
    tl.store(slopes + transposed, tl.trans(slope), mask=tl.trans(here))


@kernel("num_texts", "num_rows")
def vocabulary_gradient_kernel(
    slopes,
    winners,
    hidden,
    starts,
    grad_weight,
    grad_bias,
    num_texts,
    num_rows,
    DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """grad_weight[row] = sum over texts of slopes[row, text] * the hidden state of its winner; grad_bias[row] = of slopes."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_dim = column[None, :] < DIM
    total = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    slope_total = tl.zeros([BLOCK_N], tl.float32)
    for first in range(0, num_texts, BLOCK_N):
        text = first + tl.arange(0, BLOCK_N)
        slope = tl.load(slopes + row * num_texts + text, mask=text < num_texts, other=0.0)
        passes = slope != 0.0
        slope_total += slope
        # Most vocabulary rows are positive for few texts.
        if tl.max(passes.to(tl.int32), axis=0) != 0:
            winner = tl.load(winners + text.to(tl.int64) * num_rows + row, mask=passes, other=0).to(tl.int64)
            token = tl.load(starts + text, mask=passes, other=0) + winner
            vectors = tl.load(hidden + token[:, None] * DIM + column[None, :], mask=passes[:, None] & in_dim, other=0.0)
            total += slope[:, None] * vectors.to(tl.float32)
    if grad_weight is not None:
        tl.store(grad_weight + row * DIM + column, tl.sum(total, axis=0), mask=column < DIM)
    if grad_bias is not None:
        tl.store(grad_bias + row, tl.sum(slope_total, axis=0), mask=tl.program_id(1) == 0)
