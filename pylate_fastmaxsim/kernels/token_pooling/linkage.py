"""Ward's linkage of the tokens of each document on cosine distances, by a chain of nearest neighbours.

As SciPy's, operation by operation in float64, so that the same distances give the same merges, ties included. Compile
without fused multiply-adds, which SciPy does not have.
"""

import triton
import triton.language as tl

from pylate_fastmaxsim.kernels.runtime.cached_launch import kernel


@triton.jit
def _document_of(order, rooms, wave, share):
    """The document of this program, whether it is its turn, and where its distances are."""
    program = tl.program_id(0)
    room = tl.load(rooms + program)
    # Of many long documents they begin beyond 2^31.
    return tl.load(order + program), room // share == wave, room - tl.cast(wave, tl.int64) * share


@triton.jit
def _vectors(values, live_tokens, start, token, k, DIM: tl.constexpr):
    """Numbers `k` of the vectors of live tokens, exactly."""
    if live_tokens is not None:
        token = tl.load(live_tokens + start + token)
    pointers = values + (start + token)[:, None] * DIM + k[None, :]
    return tl.load(pointers, mask=k[None, :] < DIM, other=0.0).to(tl.float64)


@kernel("wave", "share")
def distances_kernel(
    values,
    live_tokens,
    starts,
    live,
    to_pool,
    order,
    rooms,
    distances,
    wave,
    share,
    DIM: tl.constexpr,
    HAS_DOT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """distances[i, j] = 1 - <x_i, x_j> for i != j, from 0 to 2, and 2 where that is NaN. Symmetric bit by bit."""
    document, its_turn, room = _document_of(order, rooms, wave, share)
    n = tl.load(to_pool + document).to(tl.int32)
    if its_turn:
        distances += room
        start = tl.load(starts + document)
        kept = tl.load(live + document).to(tl.int32) - n
        for first_i in range(tl.program_id(1) * TILE, n, tl.num_programs(1) * TILE):
            i = first_i + tl.arange(0, TILE)
            for first_j in range(first_i, n, TILE):
                j = first_j + tl.arange(0, TILE)
                cosine = tl.zeros([TILE, TILE], tl.float64)
                for first_k in range(0, DIM, BLOCK_K):
                    k = first_k + tl.arange(0, BLOCK_K)
                    x_i = _vectors(values, live_tokens, start, kept + tl.minimum(i, n - 1), k, DIM)
                    x_j = tl.trans(_vectors(values, live_tokens, start, kept + tl.minimum(j, n - 1), k, DIM))
                    if HAS_DOT:
                        cosine = tl.dot(x_i, x_j, cosine, out_dtype=tl.float64)
                    else:
                        cosine += tl.sum(x_i[:, :, None] * x_j[None, :, :], axis=1)
                distance = 1.0 - cosine
                distance = tl.where(distance <= 2.0, tl.where(distance > 0.0, distance, 0.0), 2.0)
                wanted = (i[:, None] < j[None, :]) & (j < n)[None, :]
                tl.store(distances + i.to(tl.int64)[:, None] * n + j[None, :], distance, mask=wanted)
                tl.store(distances + j.to(tl.int64)[None, :] * n + i[:, None], distance, mask=wanted)


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


@kernel("wave", "share")
def linkage_kernel(
    starts,
    to_pool,
    order,
    rooms,
    distances,
    sizes,
    chains,
    into,
    heights,
    steps,
    wave,
    share,
    BLOCK: tl.constexpr,
):
    """All merges of a document, each listed by the cluster that ends with it, at the start of the document.

    A cluster has the number of its last token. into[x] = the cluster that x becomes part of, heights[x] = their distance,
    steps[x] = how many merges came before. Distances are used up.
    """
    document, its_turn, room = _document_of(order, rooms, wave, share)
    n = tl.load(to_pool + document).to(tl.int32)
    if its_turn:
        distances += room
        start = tl.load(starts + document)
        sizes += start
        chains += start
        into += start
        heights += start
        steps += start
        for first in range(0, n, BLOCK):
            i = first + tl.arange(0, BLOCK)
            tl.store(sizes + i, tl.full([BLOCK], 1, tl.int32), mask=i < n)
        tl.debug_barrier()
        lowest = 0
        length = 0
        for step in range(n - 1):
            while tl.load(sizes + lowest) == 0:
                lowest += 1
            x = tl.load(chains + length - 1, mask=length > 0, other=0)
            x = tl.where(length > 0, x, lowest)
            before = tl.load(chains + length - 2, mask=length > 1, other=-1)
            tl.store(chains, x, mask=length == 0)
            length = tl.maximum(length, 1)
            going = True
            height = tl.zeros([], tl.float64)
            while going:
                row = distances + x * n.to(tl.int64)
                to_before = tl.load(row + before, mask=before >= 0, other=float("inf"))
                height, nearest = _nearest(row, sizes, x, n, BLOCK)
                # Of equal distances that to the cluster before, or the chain could go round in circles. No chain is longer
                # than n, whatever rounding does.
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
            tl.store(into + low, high)
            tl.store(heights + low, height)
            tl.store(steps + low, step)
            low_row = distances + low * n.to(tl.int64)
            high_row = distances + high * n.to(tl.int64)
            for first in range(0, n, BLOCK):
                i = first + tl.arange(0, BLOCK)
                size = tl.load(sizes + i, mask=i < n, other=0)
                other = (size > 0) & (i != low) & (i != high)
                to_low = tl.load(low_row + i, mask=other, other=0.0)
                to_high = tl.load(high_row + i, mask=other, other=0.0)
                share_of_one = 1.0 / (size_low + size_high + size).to(tl.float64)
                squared = (size + size_low).to(tl.float64) * share_of_one * to_low * to_low
                squared += (size + size_high).to(tl.float64) * share_of_one * to_high * to_high
                squared -= size.to(tl.float64) * share_of_one * height * height
                distance = tl.sqrt(tl.where(other, squared, 0.0))
                tl.store(high_row + i, distance, mask=other)
                tl.store(distances + i.to(tl.int64) * n + high, distance, mask=other)
            # All have read the sizes before they change, and all see the new ones.
            tl.debug_barrier()
            tl.store(sizes + low, 0)
            tl.store(sizes + high, size_low + size_high)
            tl.debug_barrier()
