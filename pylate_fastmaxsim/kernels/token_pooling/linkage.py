"""Ward's linkage of the tokens of each document on cosine distances, by a chain of nearest neighbours.

As SciPy's, operation by operation in float64, so that the same distances give the same merges, ties included. Compile
without fused multiply-adds, which SciPy does not have.
"""

import triton
import triton.language as tl

from pylate_fastmaxsim.kernels.runtime.cached_launch import kernel


@triton.jit
def _columns(live_tokens, start, kept, i, n):
    """Where the tokens `i` of those that are pooled stand among the rows of all documents."""
    if live_tokens is None:
        return start + kept + tl.minimum(i, n - 1)
    return start + tl.load(live_tokens + start + kept + tl.minimum(i, n - 1)).to(tl.int64)


@triton.jit
def _distances(
    vectors, live_tokens, distances, start, kept, n, row_step,
    DIM: tl.constexpr, TILE: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """distances[i, j] = 1 - <x_i, x_j>, from 0 to 2, and 2 where that is NaN. Symmetric bit by bit."""
    # Vectors come transposed, so that a number of neighbouring tokens is read at once.
    for first_i in range(0, n, TILE):
        i = first_i + tl.arange(0, TILE)
        in_i = _columns(live_tokens, start, kept, i, n)
        for first_j in range(first_i, n, TILE):
            j = first_j + tl.arange(0, TILE)
            in_j = _columns(live_tokens, start, kept, j, n)
            cosine = tl.zeros([TILE, TILE], tl.float64)
            for k in range(0, DIM, UNROLL):
                for more in tl.static_range(UNROLL):
                    row = vectors + (k + more) * row_step.to(tl.int64)
                    x_i = tl.load(row + in_i).to(tl.float32).to(tl.float64)[:, None]
                    x_j = tl.load(row + in_j).to(tl.float32).to(tl.float64)[None, :]
                    cosine = tl.fma(tl.broadcast_to(x_i, [TILE, TILE]), tl.broadcast_to(x_j, [TILE, TILE]), cosine)
            distance = 1.0 - cosine
            distance = tl.where(distance <= 2.0, tl.where(distance > 0.0, distance, 0.0), 2.0)
            inside = (i < n)[:, None] & (j < n)[None, :]
            tl.store(distances + i.to(tl.int64)[:, None] * n + j[None, :], distance, mask=inside)
            tl.store(distances + j.to(tl.int64)[None, :] * n + i[:, None], distance, mask=inside)


@triton.jit
def _nearest(row, sizes, x, n, BLOCK: tl.constexpr):
    """Distance and number of the first of the clusters nearest to `x`, whose distances are `row`."""
    best = tl.full([BLOCK], float("inf"), tl.float64)
    place = tl.zeros([BLOCK], tl.int32)
    for first in range(0, n, BLOCK):
        i = first + tl.arange(0, BLOCK)
        size = tl.load(sizes + i, mask=i < n, other=0)
        distance = tl.load(row + i, mask=i < n, other=float("inf"))
        better = (size > 0) & (i != x) & (distance < best)
        best = tl.where(better, distance, best)
        place = tl.where(better, i, place)
    smallest = tl.min(best, axis=0)
    return smallest, tl.min(tl.where(best == smallest, place, n), axis=0)


@kernel("num_documents", "programs", "side", "row_step")
def linkage_kernel(
    vectors,
    live_tokens,
    starts,
    live,
    to_pool,
    limits,
    order,
    distances,
    sizes,
    chains,
    into,
    heights,
    steps,
    num_documents,
    programs,
    side,
    row_step,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """All merges of each document, listed by the cluster that ends with it, at its start.

    A cluster has the number of its last token. into[x] = the cluster that x becomes part of, heights[x] = their distance,
    steps[x] = the how manieth merge it is. A program takes one document after the other, in `order`, and has room for the
    distances of `side` tokens, their sizes and a chain.
    """
    program = tl.program_id(0)
    distances += program.to(tl.int64) * side * side
    sizes += program.to(tl.int64) * side
    chains += program.to(tl.int64) * side
    for item in range(program, num_documents, programs):
        document = tl.load(order + item)
        n = tl.load(to_pool + document).to(tl.int32)
        if tl.load(limits + document) < n:
            start = tl.load(starts + document)
            kept = tl.load(live + document).to(tl.int32) - n
            _distances(vectors, live_tokens, distances, start, kept, n, row_step, DIM, TILE, UNROLL)
            for first in range(0, n, BLOCK):
                i = first + tl.arange(0, BLOCK)
                tl.store(sizes + i, tl.full([BLOCK], 1, tl.int32), mask=i < n)
            tl.debug_barrier()
            lowest = 0
            length = 0
            for step in range(n - 1):
                while tl.load(sizes + lowest) == 0:
                    lowest += 1
                if length == 0:
                    tl.store(chains, lowest)
                    length = 1
                    x = lowest
                else:
                    x = tl.load(chains + length - 1)
                before = tl.load(chains + length - 2, mask=length > 1, other=-1)
                going = True
                height = 0.0
                while going:
                    row = distances + x * n.to(tl.int64)
                    to_before = tl.load(row + before, mask=before >= 0, other=float("inf"))
                    height, nearest = _nearest(row, sizes, x, n, BLOCK)
                    # Of equal distances that to the cluster before, or the chain could go round in circles. No chain is
                    # longer than n, whatever rounding does.
                    going = (height < to_before) & (length < n)
                    tl.store(chains + length, nearest, mask=going)
                    length += going.to(tl.int32)
                    before = tl.where(going, x, before)
                    x = tl.where(going, nearest, x)
                length -= 2
                low = tl.minimum(x, before)
                high = tl.maximum(x, before)
                size_low = tl.load(sizes + low)
                size_high = tl.load(sizes + high)
                tl.store(into + start + low, high)
                tl.store(heights + start + low, height)
                tl.store(steps + start + low, step)
                low_row = distances + low * n.to(tl.int64)
                high_row = distances + high * n.to(tl.int64)
                for first in range(0, n, BLOCK):
                    i = first + tl.arange(0, BLOCK)
                    size = tl.load(sizes + i, mask=i < n, other=0)
                    other = (size > 0) & (i != low) & (i != high)
                    to_low = tl.load(low_row + i, mask=other, other=0.0)
                    to_high = tl.load(high_row + i, mask=other, other=0.0)
                    share = 1.0 / (size_low + size_high + size).to(tl.float64)
                    squared = (size + size_low).to(tl.float64) * share * to_low * to_low
                    squared += (size + size_high).to(tl.float64) * share * to_high * to_high
                    squared -= size.to(tl.float64) * share * height * height
                    distance = tl.sqrt(tl.where(other, squared, 0.0))
                    tl.store(high_row + i, distance, mask=other)
                    tl.store(distances + i.to(tl.int64) * n + high, distance, mask=other)
                tl.debug_barrier()
                tl.store(sizes + low, 0)
                tl.store(sizes + high, size_low + size_high)
                tl.debug_barrier()
