"""Some documents decompressed to 16-bit vectors, each at a place of its own."""

import triton
import triton.language as tl

from pylate_fastmaxsim.kernels.primitives.stored import from_e4m3, residual_vectors
from pylate_fastmaxsim.kernels.runtime.cached_launch import Launcher


@Launcher
@triton.jit(do_not_specialize=["blocks_per_document", "max_length"])
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
