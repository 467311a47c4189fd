"""Cuts the tree of merges of each document into at most so many clusters, numbered as SciPy's ``fcluster`` does."""

import triton
import triton.language as tl

from pylate_fastmaxsim.kernels.runtime.cached_launch import kernel


@triton.jit
def _ranks(heights, steps, ranks, by_rank, merges, BLOCK: tl.constexpr):
    """ranks[x] = merges below that of x, by height and then in the order in which they were made, and by_rank[ranks[x]] = x."""
    for first in range(0, merges, BLOCK):
        x = first + tl.arange(0, BLOCK)
        height = tl.load(heights + x, mask=x < merges, other=0.0)
        step = tl.load(steps + x, mask=x < merges, other=0)
        rank = tl.zeros([BLOCK], tl.int32)
        for first_other in range(0, merges, BLOCK):
            y = first_other + tl.arange(0, BLOCK)
            other = tl.load(heights + y, mask=y < merges, other=float("inf"))[None, :]
            earlier = tl.load(steps + y, mask=y < merges, other=merges)[None, :] < step[:, None]
            below = (other < height[:, None]) | ((other == height[:, None]) & earlier)
            rank += tl.sum(below.to(tl.int32), axis=1)
        tl.store(ranks + x, rank, mask=x < merges)
        tl.store(by_rank + rank, x, mask=x < merges)


@triton.jit
def _root(parents, x):
    parent = tl.load(parents + x)
    while parent != x:
        x = parent
        parent = tl.load(parents + x)
    return x


@kernel("step")
def cut_kernel(
    live_tokens,
    starts,
    live,
    to_pool,
    limits,
    new_starts,
    into,
    heights,
    steps,
    scratch,
    rows,
    counts,
    step,
    BLOCK: tl.constexpr,
):
    """rows[token] = row of the result, counts[document] = clusters. Scratch: ten lists of `step` integers.

    Merges up to the height that leaves at most as many clusters as asked for are made; where further ones have this height
    too, they are made as well. Clusters are numbered from the root of the tree down: first the child that has children, of
    two that have the one that was merged first.
    """
    document = tl.program_id(0)
    n = tl.load(to_pool + document).to(tl.int32)
    limit = tl.load(limits + document).to(tl.int32)
    start = tl.load(starts + document)
    into += start
    ranks = scratch + start
    by_rank = ranks + step
    parents = by_rank + step
    nodes = parents + step
    found = nodes + step
    held = found + step
    firsts = held + step
    seconds = firsts + step
    # Of each node, a token or n + the rank of a merge, the number of its first cluster.
    offsets = seconds + step + start
    clusters = n
    if limit < n:
        _ranks(heights + start, steps + start, ranks, by_rank, n - 1, BLOCK)
        tl.debug_barrier()
        height = tl.load(heights + start + tl.load(by_rank + n - limit - 1))
        made = 0
        for first in range(0, n, BLOCK):
            x = first + tl.arange(0, BLOCK)
            merged = tl.load(heights + start + x, mask=x < n - 1, other=float("inf")) <= height
            made += tl.sum(merged.to(tl.int32), axis=0)
            tl.store(parents + x, tl.where(merged, tl.load(into + x, mask=merged, other=0), x), mask=x < n)
            tl.store(nodes + x, x, mask=x < n)
            tl.store(held + x, tl.full([BLOCK], 1, tl.int32), mask=x < n)
        tl.debug_barrier()
        # Each time half of the steps to a root are left.
        longest = 1
        while longest < n:
            for first in range(0, n, BLOCK):
                x = first + tl.arange(0, BLOCK)
                parent = tl.load(parents + x, mask=x < n, other=0)
                tl.store(parents + x, tl.load(parents + parent, mask=x < n, other=0), mask=x < n)
            tl.debug_barrier()
            longest *= 2
        for first in range(0, n, BLOCK):
            x = first + tl.arange(0, BLOCK)
            root = tl.load(parents + x, mask=x < n, other=0)
            rank = tl.load(ranks + x, mask=x < n - 1, other=n)
            tl.atomic_max(nodes + root, n + rank, mask=rank < made, sem="relaxed")
        tl.debug_barrier()
        for first in range(0, n, BLOCK):
            x = first + tl.arange(0, BLOCK)
            root = tl.load(parents + x, mask=x < n, other=0)
            tl.store(found + x, tl.load(nodes + root, mask=x < n, other=0), mask=x < n)
        tl.debug_barrier()
        for rank in range(made, n - 1):
            x = tl.load(by_rank + rank)
            a = _root(parents, x)
            b = _root(parents, tl.load(into + x))
            node_a = tl.load(nodes + a)
            node_b = tl.load(nodes + b)
            held_a = tl.load(held + a)
            held_b = tl.load(held + b)
            a_first = tl.where(node_a < n, node_a + 2 * n, node_a) < tl.where(node_b < n, node_b + 2 * n, node_b)
            tl.debug_barrier()
            tl.store(firsts + rank, tl.where(a_first, node_a, node_b))
            tl.store(seconds + rank, tl.where(a_first, node_b, node_a))
            # Of merges that are left by_rank is read no more: how many clusters the first child holds.
            tl.store(by_rank + rank, tl.where(a_first, held_a, held_b))
            tl.store(parents + a, b)
            tl.store(nodes + b, n + rank)
            tl.store(held + b, held_a + held_b)
            tl.debug_barrier()
        clusters = n - made
        tl.store(offsets + 2 * n - 2, 0)
        tl.debug_barrier()
        for place in range(clusters - 1):
            rank = n - 2 - place
            offset = tl.load(offsets + n + rank)
            tl.store(offsets + tl.load(firsts + rank), offset)
            tl.store(offsets + tl.load(seconds + rank), offset + tl.load(by_rank + rank))
            tl.debug_barrier()
    tl.store(counts + document, clusters.to(tl.int64))
    all_tokens = tl.load(live + document).to(tl.int32)
    new_start = tl.load(new_starts + document)
    kept = all_tokens - n
    for first in range(0, all_tokens, BLOCK):
        token = first + tl.arange(0, BLOCK)
        inside = token < all_tokens
        place = token
        if limit < n:
            node = tl.load(found + token - kept, mask=inside & (token >= kept), other=0)
            number = tl.load(offsets + node, mask=inside & (token >= kept), other=0)
            place = tl.where(token < kept, token, kept + number)
        row = token
        if live_tokens is not None:
            row = tl.load(live_tokens + start + token, mask=inside, other=0)
        tl.store(rows + start + row, new_start + place, mask=inside)
