"""Means of the vectors that go to one row, in the order of tokens."""

import triton.language as tl

from pylate_fastmaxsim.kernels.runtime.cached_launch import kernel


@kernel()
def means_kernel(values, order, firsts, sizes, means, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """means[row] = the mean of values[order[i]] for the sizes[row] places i from firsts[row] on; 0 of none."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    size = tl.load(sizes + row).to(tl.int32)
    order += tl.load(firsts + row)
    total = tl.zeros([BLOCK], tl.float32)
    for place in range(size):
        token = tl.load(order + place)
        total += tl.load(values + token * DIM + k, mask=k < DIM, other=0.0).to(tl.float32)
    tl.store(means + row * DIM + k, total / tl.maximum(size, 1).to(tl.float32), mask=k < DIM)
