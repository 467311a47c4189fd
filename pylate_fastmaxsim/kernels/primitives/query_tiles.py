"""The query rows that a program holds, and the scores of their queries.

A tile of BLOCK_M rows holds BLOCK_M // ROWS_PER_QUERY queries, one every ROWS_PER_QUERY rows. With ONE_QUERY it is one of
the `row_blocks` that a query is cut into.
"""

import triton
import triton.language as tl


@triton.jit
def rows_of_tile(
    tile,
    q_starts,
    q_lengths,
    q_keep,
    num_queries,
    row_blocks,
    ROWS_PER_QUERY: tl.constexpr,
    ONE_QUERY: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Query (of the whole tile with ONE_QUERY, else of each row), rows of `q_values`, and which of them are live."""
    row_in_tile = tl.arange(0, BLOCK_M)
    if ONE_QUERY:
        query = tile // row_blocks
        offset = (tile % row_blocks) * BLOCK_M + row_in_tile
        q_start = tl.load(q_starts + query)
        q_length = tl.load(q_lengths + query).to(tl.int32)
    else:
        query = tile * (BLOCK_M // ROWS_PER_QUERY) + row_in_tile // ROWS_PER_QUERY
        offset = row_in_tile % ROWS_PER_QUERY
        q_start = tl.load(q_starts + query, mask=query < num_queries, other=0)
        q_length = tl.load(q_lengths + query, mask=query < num_queries, other=0).to(tl.int32)
    q_row = q_start + offset
    q_live = offset < q_length
    if q_keep is not None:
        q_live = q_live & (tl.load(q_keep + q_row, mask=q_live, other=0) != 0)
    return query, q_row, q_live


@triton.jit
def store_scores(
    scores,
    totals,
    q_live,
    tile,
    query,
    first_slot,
    last_slot,
    num_queries,
    num_slots,
    row_blocks,
    ROWS_PER_QUERY: tl.constexpr,
    ONE_QUERY: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Sum `totals` ``[BLOCK_M, 8]`` over the live rows of each query, for the slots from `first_slot` to `last_slot`."""
    slots = first_slot + tl.arange(0, 8)
    totals = tl.where(q_live[:, None], totals, 0.0)
    if ONE_QUERY:
        score = tl.sum(totals, axis=0)
        row = (tile % row_blocks).to(tl.int64) * num_queries + query
        tl.store(scores + row * num_slots + slots, score, mask=slots <= last_slot)
    else:
        QUERIES: tl.constexpr = BLOCK_M // ROWS_PER_QUERY
        score = tl.sum(tl.reshape(totals, [QUERIES, ROWS_PER_QUERY, 8]), axis=1)
        of_tile = tile * QUERIES + tl.arange(0, QUERIES)
        tl.store(
            scores + of_tile.to(tl.int64)[:, None] * num_slots + slots[None, :],
            score,
            mask=(of_tile < num_queries)[:, None] & (slots <= last_slot)[None, :],
        )
