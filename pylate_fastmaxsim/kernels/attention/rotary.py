"""Rotary positions of queries and keys, in the place where the projection left them."""

import triton
import triton.language as tl

from pylate_fastmaxsim.kernels.attention.tiles import turned
from pylate_fastmaxsim.kernels.runtime.cached_launch import Launcher


@Launcher
@triton.jit(do_not_specialize=["num_rows"])
def rotary_kernel(qkv, cos, sin, num_rows, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Turn the queries and keys of ``qkv [num_rows, 3, HEADS, DIM]``, BLOCK of them in a program.

    Of `cos` and `sin`, ``[num_rows, DIM]``, the first half of the columns is read; the second is equal to it.
    """
    HALF: tl.constexpr = DIM // 2
    vector = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = (vector // (2 * HEADS)).to(tl.int64)
    inside = (row < num_rows)[:, None]
    columns = tl.arange(0, HALF)[None, :]
    # Queries and keys of a row lie side by side.
    place = (row * (3 * HEADS * DIM) + vector % (2 * HEADS) * DIM)[:, None] + columns
    first = tl.load(qkv + place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(qkv + place + HALF, mask=inside, other=0.0).to(tl.float32)
    angle = (row * DIM)[:, None] + columns
    cos_tile = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
    sin_tile = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
    first, second = turned(first, second, cos_tile, sin_tile)
    tl.store(qkv + place, first.to(qkv.dtype.element_ty), mask=inside)
    tl.store(qkv + place + HALF, second.to(qkv.dtype.element_ty), mask=inside)
