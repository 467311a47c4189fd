"""Tiles of similarities that are equal bit by bit in every kernel, and integers in the order of floats.

One kernel finds the k-th largest similarity, and another compares it with similarities of its own. These are equal bit
by bit if both cut d into the same chunks and use the same kind of matrix instruction; the size of a tile does not matter.
"""

import triton
import triton.language as tl

from pylate_fastmaxsim.kernels.primitives.matmul import product

# The key of every NaN: as in topk, larger than any number.
NAN_KEY = tl.constexpr(0x7FFFFFFF)


@triton.jit
def held_rows(values, row, live, DIM: tl.constexpr, BLOCK_K: tl.constexpr):
    """Pointers to the first BLOCK_K numbers of rows, and the loaded rows where d is at most BLOCK_K."""
    k = tl.arange(0, BLOCK_K)
    pointers = values + row.to(tl.int64)[:, None] * DIM + k[None, :]
    # Both branches need the name. With a larger d nothing reads it.
    tile = pointers
    if DIM <= BLOCK_K:
        tile = tl.load(pointers, mask=live[:, None] & (k[None, :] < DIM), other=0.0)
    return pointers, tile


@triton.jit
def inner_products(
    q_tile,
    q_pointers,
    q_live,
    d_pointers,
    DIM: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Products of BLOCK_M query rows, in `q_tile` if d is at most BLOCK_K, with the BLOCK_N tokens of `d_pointers`."""
    k = tl.arange(0, BLOCK_K)
    similarity = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if DIM <= BLOCK_K:
        d_tile = tl.load(d_pointers, mask=k[None, :] < DIM, other=0.0)
        similarity = product(q_tile, tl.trans(d_tile), similarity, PRECISION)
    else:
        for first_k in range(0, DIM, BLOCK_K):
            in_dim = first_k + k[None, :] < DIM
            q_chunk = tl.load(q_pointers + first_k, mask=q_live[:, None] & in_dim, other=0.0)
            d_chunk = tl.load(d_pointers + first_k, mask=in_dim, other=0.0)
            similarity = product(q_chunk, tl.trans(d_chunk), similarity, PRECISION)
    return similarity


@triton.jit
def similarity_tile(
    q_tile,
    q_pointers,
    q_live,
    d_values,
    d_row,
    DIM: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Inner products of BLOCK_M query rows and the BLOCK_N rows of `d_values` that `d_row` names."""
    d_pointers = d_values + d_row.to(tl.int64)[:, None] * DIM + tl.arange(0, BLOCK_K)[None, :]
    return inner_products(q_tile, q_pointers, q_live, d_pointers, DIM, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K)


@triton.jit
def order_key(x):
    """int32 in the order of float32. -0 is 0, NaN is the largest, and the smallest int32 is the key of no number."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(x != x, NAN_KEY, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def key_value(key):
    """The float32 of a key. Keys below that of -infinity give NaN."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


# Smaller than a similarity, and a number: 0 times it is 0.
NO_COLUMN = tl.constexpr(-3.0e38)


@triton.jit
def without_columns_past_the_end(similarity, first, length, BLOCK_N: tl.constexpr):
    """Similarities of the columns from `first` on, with NO_COLUMN in those that a sequence of `length` does not have."""
    if first + BLOCK_N > length:
        here = first + tl.arange(0, BLOCK_N) < length
        similarity = tl.where(here[None, :], similarity, NO_COLUMN)
    return similarity
