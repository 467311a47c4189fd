"""Projection of hidden states to unit token vectors: products, bias and norm stay in float32 on the chip."""

import triton
import triton.language as tl

from pylate_fastmaxsim.kernels.primitives.matmul import product
from pylate_fastmaxsim.kernels.runtime.cached_launch import kernel

# F.normalize divides by the norm or by this, whichever is larger.
EPSILON = tl.constexpr(1e-12)


@triton.jit
def inverse_of_norm(squares):
    return 1.0 / tl.maximum(tl.sqrt(squares), EPSILON)


@kernel("num_rows")
def project_kernel(
    hidden,
    weight,
    bias,
    embeddings,
    inverse_norms,
    squares,
    num_rows,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_T rows of `hidden @ weight.T + bias`, BLOCK_D columns of them.

    Rows that fit a tile are normalised before they are rounded. Columns of longer rows are written unnormalised, with
    their sum of squares, and normalize_kernel follows.
    """
    COLUMN_BLOCKS: tl.constexpr = (OUT + BLOCK_D - 1) // BLOCK_D
    # Columns vary fastest, so that programs running together share rows in L2.
    program = tl.program_id(0)
    column_block = program % COLUMN_BLOCKS
    row = (program // COLUMN_BLOCKS).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = column_block * BLOCK_D + tl.arange(0, BLOCK_D)
    k = tl.arange(0, BLOCK_K)
    # Rows past the end repeat the last row, which needs no mask; they are not written.
    x_pointers = hidden + tl.minimum(row, num_rows - 1)[:, None] * IN + k[None, :]
    w_pointers = weight + tl.minimum(column, OUT - 1)[:, None] * IN + k[None, :]
    total = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for first in range(0, IN, BLOCK_K):
        if IN % BLOCK_K == 0:
            x = tl.load(x_pointers + first)
            w = tl.load(w_pointers + first)
        else:
            in_dim = first + k[None, :] < IN
            x = tl.load(x_pointers + first, mask=in_dim, other=0.0)
            w = tl.load(w_pointers + first, mask=in_dim, other=0.0)
        total = product(x, tl.trans(w), total, PRECISION)
    if bias is not None:
        total += tl.load(bias + tl.minimum(column, OUT - 1)).to(tl.float32)[None, :]
    in_rows = row < num_rows
    if NORMALIZE:
        square = tl.sum(tl.where(column[None, :] < OUT, total * total, 0.0), axis=1)
        if COLUMN_BLOCKS == 1:
            inverse = inverse_of_norm(square)
            total *= inverse[:, None]
            tl.store(inverse_norms + row, inverse, mask=in_rows)
        else:
            tl.store(squares + row * COLUMN_BLOCKS + column_block, square, mask=in_rows)
    mask = in_rows[:, None] & (column[None, :] < OUT)
    tl.store(embeddings + row[:, None] * OUT + column[None, :], total, mask=mask)


@kernel("num_rows")
def normalize_kernel(
    embeddings,
    inverse_norms,
    squares,
    num_rows,
    OUT: tl.constexpr,
    COLUMN_BLOCKS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Divides rows in place by their norm, the square root of the sum of their `squares`."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    in_rows = row < num_rows
    square = tl.zeros([BLOCK_T], tl.float32)
    for block in range(COLUMN_BLOCKS):
        square += tl.load(squares + row * COLUMN_BLOCKS + block, mask=in_rows, other=0.0)
    inverse = inverse_of_norm(square)
    tl.store(inverse_norms + row, inverse, mask=in_rows)
    for first in range(0, OUT, BLOCK_D):
        column = first + tl.arange(0, BLOCK_D)
        mask = in_rows[:, None] & (column[None, :] < OUT)
        pointers = embeddings + row[:, None] * OUT + column[None, :]
        values = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        tl.store(pointers, values * inverse[:, None], mask=mask)
