"""Token vectors rounded to int8 or e4m3, and documents decompressed to 16-bit vectors."""

import triton.language as tl

from pylate_fastmaxsim.kernels.primitives.running_maximum import maximum_or_nan
from pylate_fastmaxsim.kernels.primitives.stored import from_e4m3, residual_vectors
from pylate_fastmaxsim.kernels.runtime.cached_launch import kernel

# Added to a float32 of at most 2**22 and taken away again, it leaves a whole number, rounded half to even.
_TO_WHOLE = tl.constexpr(12582912.0)


@kernel("num_rows")
def round_rows_kernel(
    values,
    rounded,
    scales,
    num_rows,
    factor,
    IS_INT8: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """`rounded` is `values` over the scale of each row, and `scales` that scale times `factor`.

    The largest number of a row becomes 127 (int8), or comes into (224, 448] by a power of two (e4m3). A row with NaN or
    infinity becomes zeros with a scale of NaN.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    k = tl.arange(0, BLOCK_K)
    live = row < num_rows
    largest = tl.zeros([BLOCK_ROWS], tl.float32)
    for first_k in range(0, DIM, BLOCK_K):
        mask = live[:, None] & (first_k + k[None, :] < DIM)
        x = tl.load(values + row[:, None] * DIM + first_k + k[None, :], mask=mask, other=0.0).to(tl.float32)
        largest = maximum_or_nan(largest, tl.reduce(tl.abs(x), 1, maximum_or_nan))
    finite = largest < float("inf")
    if IS_INT8:
        scale = tl.div_rn(largest, 127.0)
    else:
        bits = largest.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) - 127 - 8 + tl.where((bits & 0x7FFFFF) > 0x600000, 1, 0)
        exponent = tl.minimum(tl.maximum(exponent, -120), 120)
        scale = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
        scale = tl.where(largest == 0.0, 0.0, scale)
    divisor = tl.where(scale == 0.0, 1.0, scale)
    tl.store(scales + row, tl.where(finite, scale * factor, float("nan")), mask=live)
    for first_k in range(0, DIM, BLOCK_K):
        mask = live[:, None] & (first_k + k[None, :] < DIM)
        x = tl.load(values + row[:, None] * DIM + first_k + k[None, :], mask=mask, other=0.0).to(tl.float32)
        x = tl.where(finite[:, None], x, 0.0)
        x = tl.div_rn(x, tl.broadcast_to(divisor[:, None], [BLOCK_ROWS, BLOCK_K]))
        if IS_INT8:
            x = (x + _TO_WHOLE) - _TO_WHOLE
        tl.store(rounded + row[:, None] * DIM + first_k + k[None, :], x.to(rounded.dtype.element_ty), mask=mask)


@kernel("blocks_per_document", "max_length")
def decompress_kernel(
    stored,
    scales,
    codes,
    centroids,
    byte_words,
    d_starts,
    d_lengths,
    keep,
    vectors,
    kept,
    blocks_per_document,
    max_length,
    scale,
    FORMAT: tl.constexpr,
    BITS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """vectors[document * max_length + token] = a token of a document, and `kept` whether it counts, as `keep` says.

    FORMAT is "residual", or "fp8", which comes as bytes.
    """
    document = (tl.program_id(0) // blocks_per_document).to(tl.int64)
    first = (tl.program_id(0) % blocks_per_document) * BLOCK_N
    length = tl.load(d_lengths + document).to(tl.int32)
    if first < length:
        # The last token is written more than once where a block is not full, always the same.
        token = tl.minimum(first + tl.arange(0, BLOCK_N), length - 1).to(tl.int64)
        row = tl.load(d_starts + document) + token
        there = document * max_length + token
        k = tl.arange(0, BLOCK_K)
        if FORMAT == "residual":
            vector = residual_vectors(
                row, stored, codes, centroids, byte_words, scales, DIM, BITS, BLOCK_N, BLOCK_K
            )  # fmt: skip
        else:
            byte = tl.load(stored + row[:, None] * DIM + k[None, :], mask=k[None, :] < DIM, other=0)
            vector = from_e4m3(byte.to(tl.int32)) * scale
        pointers = vectors + there[:, None] * DIM + k[None, :]
        tl.store(pointers, vector.to(vectors.dtype.element_ty), mask=k[None, :] < DIM)
        if keep is not None:
            tl.store(kept + there, tl.load(keep + row))
