"""Tiles of numbers from what is stored: e4m3 where the hardware has none, int8 with its scales, residual codes."""

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
