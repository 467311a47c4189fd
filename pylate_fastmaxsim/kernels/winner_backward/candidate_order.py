"""The (query, slot) pairs of a candidate list in the order of their documents, in one launch."""

import triton
import triton.language as tl

from pylate_fastmaxsim.kernels.runtime.cached_launch import Launcher


@Launcher
@triton.jit(do_not_specialize=["num_pairs", "num_documents"])
def candidate_order_kernel(
    candidates, pairs, pair_offsets, num_pairs, num_documents, BLOCK: tl.constexpr, BLOCK_SCAN: tl.constexpr
):
    """pairs[pair_offsets[n] : pair_offsets[n + 1]] = flat indices of document n in `candidates`, ascending.

    Every pair counts the pairs that come before it, and every document the pairs of earlier documents: a stable sort of
    quadratic cost, which for short lists is faster than the launches of a linear one.
    """
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_pair = index < num_pairs
    named = tl.load(candidates + index, mask=is_pair, other=0).to(tl.int32)
    document = tl.where(is_pair, named, index - num_pairs)
    ties = tl.where(is_pair, index, 0)
    before = tl.zeros([BLOCK], tl.int32)
    for first in range(0, num_pairs, BLOCK_SCAN):
        other = first + tl.arange(0, BLOCK_SCAN)
        other_named = tl.load(candidates + other, mask=other < num_pairs, other=2147483647).to(tl.int32)
        earlier = other_named[None, :] < document[:, None]
        tied = (other_named[None, :] == document[:, None]) & (other[None, :] < ties[:, None])
        before += tl.sum((earlier | tied).to(tl.int32), axis=1)
    tl.store(pairs + before, index, mask=is_pair)
    tl.store(pair_offsets + index - num_pairs, before, mask=(index >= num_pairs) & (index <= num_pairs + num_documents))
