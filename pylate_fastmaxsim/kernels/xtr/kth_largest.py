"""Exact k-th largest similarity of every query row to all live document tokens, without holding the similarities.

The k-th largest of the maxima of groups of tokens is a lower bound: at least k tokens reach it. As a rule few more than
k exceed it. These are collected, and the k-th largest is selected among them. Where they do not fit, the k-th largest of
those that did is a better bound for another round. Rows that are left after that are bisected, with all products for
every step. Which similarities fit depends on the order of atomics, but no result does.

Programs whose rows are done return at once. Nothing waits for the device.
"""

import triton.language as tl

from pylate_fastmaxsim.kernels.primitives.similarities import NAN_KEY, held_rows, key_value, order_key, similarity_tile
from pylate_fastmaxsim.kernels.runtime.cached_launch import kernel


@kernel("first_row", "num_queries", "num_groups", "k", "capacity")
def bound_kernel(
    groups, q_offsets, bounds, pending, pool, first_row, num_queries, num_groups, k, capacity, BLOCK: tl.constexpr
):
    """bounds[row] = a key that at least k tokens reach, by the k-th largest group; the lowest if there are fewer."""
    local = tl.program_id(0)
    live = first_row + local < tl.load(q_offsets + num_queries)
    low = tl.full([], -32768, tl.int32)
    if live:
        high = tl.full([], 32768, tl.int32)
        groups += tl.cast(local, tl.int64) * num_groups
        for _ in range(16):
            middle = (low + high) >> 1
            reached = tl.zeros([BLOCK], tl.int32)
            for first in range(0, num_groups, BLOCK):
                group = first + tl.arange(0, BLOCK)
                key = tl.load(groups + group, mask=group < num_groups, other=-32768).to(tl.int32)
                reached += (key >= middle).to(tl.int32)
            enough = tl.sum(reached, axis=0) >= k
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
        # Half a key of NaN is larger than infinity, but no key of a number.
        low = tl.minimum(low, 0x7F80)
    tl.store(bounds + local, low << 16)
    tl.store(pool + tl.cast(local, tl.int64) * (1 + capacity), 0)
    tl.store(pending + local, live.to(tl.int32))


@kernel("first_row", "num_documents", "num_tiles", "num_parts", "capacity")
def collect_kernel(
    q_values,
    q_rows,
    d_values,
    d_rows,
    d_offsets,
    bounds,
    pending,
    pool,
    first_row,
    num_documents,
    num_tiles,
    num_parts,
    capacity,
    DIM: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Similarities above the bound of a row that is pending go to pool[row, 1 : 1 + capacity], as bits.

    pool[row, 0] counts them all. The count is part of the pool so that Triton gives atomics and stores one layout.
    """
    program = tl.program_id(0)
    tile = program % num_tiles
    part = program // num_tiles
    local = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    wanted = tl.load(pending + local) != 0
    if tl.max(wanted.to(tl.int32), axis=0) > 0:
        # NaN, and every number where there is no bound, is not at most the bound.
        bound = key_value(tl.load(bounds + local))
        row = tl.load(q_rows + first_row + local, mask=wanted, other=0)
        q_pointers, q_tile = held_rows(q_values, row, wanted, DIM, BLOCK_K)
        num_tokens = tl.load(d_offsets + num_documents).to(tl.int32)
        share = tl.cdiv(tl.cdiv(num_tokens, num_parts), BLOCK_N) * BLOCK_N
        end = tl.minimum((part + 1) * share, num_tokens)
        column = tl.arange(0, BLOCK_N)
        pool_pointers = pool + (local.to(tl.int64) * (1 + capacity))[:, None] + tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
        for first in range(part * share, end, BLOCK_N):
            token = first + column
            d_row = tl.load(d_rows + tl.minimum(token, end - 1))
            similarity = similarity_tile(
                q_tile, q_pointers, wanted, d_values, d_row, DIM, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K
            )
            above = (similarity <= bound[:, None]) == 0
            above = above & wanted[:, None] & (token < end)[None, :]
            place = tl.atomic_add(pool_pointers, 1, mask=above, sem="relaxed")
            bits = similarity.to(tl.int32, bitcast=True)
            tl.store(pool_pointers + 1 + place, bits, mask=above & (place < capacity))


@kernel("first_row", "k", "capacity")
def select_kernel(q_rows, bounds, pending, pool, thresholds, first_row, k, capacity, BLOCK: tl.constexpr):
    """thresholds[row] = the k-th largest collected similarity if all were collected; otherwise a better bound."""
    local = tl.program_id(0)
    if tl.load(pending + local) != 0:
        pool += tl.cast(local, tl.int64) * (1 + capacity)
        count = tl.load(pool)
        filled = tl.minimum(count, capacity)
        # At least k tokens reach the bound. If fewer exceed it, it is the k-th largest itself.
        kth = tl.load(bounds + local)
        if count >= k:
            low = tl.full([], -2147483648, tl.int64)
            high = tl.full([], 2147483648, tl.int64)
            for _ in range(32):
                middle = (low + high) >> 1
                reached = tl.zeros([BLOCK], tl.int32)
                for first in range(0, filled, BLOCK):
                    index = first + tl.arange(0, BLOCK)
                    bits = tl.load(pool + 1 + index, mask=index < filled, other=0)
                    key = order_key(bits.to(tl.float32, bitcast=True))
                    reached += ((index < filled) & (key >= middle)).to(tl.int32)
                enough = tl.sum(reached, axis=0) >= k
                low = tl.where(enough, middle, low)
                high = tl.where(enough, high, middle)
            kth = low.to(tl.int32)
        if (count <= capacity) | (kth == NAN_KEY):
            # With no bound and fewer than k tokens all pass.
            value = tl.where(kth == -2147483648, float("-inf"), key_value(kth))
            tl.store(thresholds + tl.load(q_rows + first_row + local), value)
            tl.store(pending + local, 0)
        else:
            tl.store(bounds + local, kth)
            tl.store(pool, 0)


@kernel("first_row", "num_documents", "k")
def bisect_kernel(
    q_values,
    q_rows,
    d_values,
    d_rows,
    d_offsets,
    bounds,
    pending,
    thresholds,
    first_row,
    num_documents,
    k,
    DIM: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """thresholds[row] of the rows that are still pending, by bisection of the keys above the bound."""
    local = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    wanted = tl.load(pending + local) != 0
    if tl.max(wanted.to(tl.int32), axis=0) > 0:
        row = tl.load(q_rows + first_row + local, mask=wanted, other=0)
        q_pointers, q_tile = held_rows(q_values, row, wanted, DIM, BLOCK_K)
        num_tokens = tl.load(d_offsets + num_documents).to(tl.int32)
        column = tl.arange(0, BLOCK_N)
        low = tl.load(bounds + local).to(tl.int64)
        high = tl.where(wanted, 2147483648, low + 1)
        while tl.max(high - low, axis=0) > 1:
            middle = (low + high) >> 1
            reached = tl.zeros([BLOCK_M], tl.int32)
            for first in range(0, num_tokens, BLOCK_N):
                token = first + column
                d_row = tl.load(d_rows + tl.minimum(token, num_tokens - 1))
                similarity = similarity_tile(
                    q_tile, q_pointers, wanted, d_values, d_row, DIM, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K
                )
                reaches = (order_key(similarity) >= middle.to(tl.int32)[:, None]) & (token < num_tokens)[None, :]
                reached += tl.sum(reaches.to(tl.int32), axis=1)
            # Rows that are done have nothing between the two; their counts change nothing.
            enough = reached >= k
            low = tl.where(enough & (high - low > 1), middle, low)
            high = tl.where(enough | (high - low <= 1), high, middle)
        tl.store(thresholds + row, key_value(low.to(tl.int32)), mask=wanted)
