"""Compressed documents: their vectors, and tiles of similarities to what is stored."""

import triton
import triton.language as tl


@triton.jit
def from_e4m3(byte):
    """float32 of the bits of an e4m3 that is no NaN. Its exponent has a bias of 7, which the factor makes up for."""
    bits = ((byte & 0x80) << 24) | ((byte & 0x7F) << 20)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120


@triton.jit
def residual_vectors(
    row,
    packed,
    codes,
    centroids,
    byte_words,
    scales,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The vectors ``[BLOCK_N, BLOCK_K]`` of tokens in float32: (centroid + bucket weights) * scale, 0 from DIM on.

    `byte_words` holds for each byte the weights of its numbers, two float16 to a word. Without `scales` a vector is divided by
    its norm.
    """
    BYTES: tl.constexpr = DIM * BITS // 8
    WORDS: tl.constexpr = 4 // BITS
    byte = tl.arange(0, BLOCK_K * BITS // 8)
    stored = tl.load(packed + row[:, None] * BYTES + byte[None, :], mask=byte[None, :] < BYTES, other=0).to(tl.int32)
    word = tl.load(byte_words + stored[:, :, None] * WORDS + tl.arange(0, WORDS)[None, None, :])
    low = word.to(tl.int16).to(tl.float16, bitcast=True)
    high = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    weight = tl.reshape(tl.join(low, high), [BLOCK_N, BLOCK_K]).to(tl.float32)
    k = tl.arange(0, BLOCK_K)
    code = tl.load(codes + row).to(tl.int64)
    centroid = tl.load(centroids + code[:, None] * DIM + k[None, :], mask=k[None, :] < DIM, other=0.0)
    vector = tl.where(k[None, :] < DIM, centroid.to(tl.float32) + weight, 0.0)
    if scales is not None:
        scale = tl.load(scales + row)
    else:
        scale = tl.rsqrt(tl.maximum(tl.sum(vector * vector, axis=1), 1e-24))
    return vector * scale[:, None]


# 1.5 * 2**23. A whole number of at most 2**22 that is added to its bits makes them those of the sum: sums of int8 products
# become floats by one subtraction, faster than by a conversion.
_OFFSET = tl.constexpr(12582912.0)
_OFFSET_BITS = tl.constexpr(0x4B400000)


@triton.jit
def _products(
    total,
    q_tile,
    q_pointers,
    q_live,
    d_pointers,
    DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """total + products of int8 (int32) or of e4m3 (float32)."""
    k = tl.arange(0, BLOCK_K)
    if DIM <= BLOCK_K:
        d_tile = tl.load(d_pointers, mask=k[None, :] < DIM, other=0.0)
        total = tl.dot(q_tile, tl.trans(d_tile), total, out_dtype=total.dtype)
    else:
        for first_k in range(0, DIM, BLOCK_K):
            in_dim = first_k + k[None, :] < DIM
            q_chunk = tl.load(q_pointers + first_k, mask=q_live[:, None] & in_dim, other=0.0)
            d_chunk = tl.load(d_pointers + first_k, mask=in_dim, other=0.0)
            total = tl.dot(q_chunk, tl.trans(d_chunk), total, out_dtype=total.dtype)
    return total


@triton.jit
def similarities_as_stored(
    q_tile,
    q_pointers,
    q_live,
    stored,
    scales,
    codes,
    centroids,
    byte_words,
    start,
    live_tokens,
    length,
    first,
    FORMAT: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    BITS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Products of query rows with tokens of a compressed document that begins at row `start` of `stored`.

    FORMAT is "int8", "fp8" or "residual" (d of at most BLOCK_K). Without scales of query rows, and of int8 documents unless
    PER_TOKEN: these are not negative, so they wait until the maximum is known.
    """
    OFFSET: tl.constexpr = PER_TOKEN and 127 * 127 * DIM <= 2**22
    column = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Columns past the end repeat the last token, which changes no maximum and needs no mask.
    last_token = tl.maximum(length, 1) - 1
    if live_tokens is None:
        row = start + first + tl.minimum(column, last_token - first).to(tl.int64)
    else:
        token = tl.load(live_tokens + tl.minimum(first + column, last_token), mask=length > 0, other=0)
        row = start + token.to(tl.int64)
    if FORMAT == "residual":
        d_tile = residual_vectors(
            row, stored, codes, centroids, byte_words, scales, DIM, BITS, BLOCK_N, BLOCK_K
        )  # fmt: skip
        similarity = tl.dot(q_tile, tl.trans(d_tile.to(q_tile.dtype)))
    else:
        d_pointers = stored + row[:, None] * DIM + k[None, :]
        if FORMAT == "int8":
            total = tl.full([BLOCK_M, BLOCK_N], _OFFSET_BITS if OFFSET else 0, tl.int32)
        else:
            total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        similarity = _products(total, q_tile, q_pointers, q_live, d_pointers, DIM, BLOCK_K)
        if PER_TOKEN:
            if OFFSET:
                similarity = similarity.to(tl.float32, bitcast=True) - _OFFSET
            similarity = similarity.to(tl.float32) * tl.load(scales + row)[None, :]
    return similarity
