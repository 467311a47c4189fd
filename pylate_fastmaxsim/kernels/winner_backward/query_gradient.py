"""Query gradient: each query row gathers the document tokens that won for it."""

import triton.language as tl

from pylate_fastmaxsim.kernels.runtime.cached_launch import kernel


@kernel("num_slots", "num_rows", "row_blocks")
def query_gradient_kernel(
    grad_scores,
    winners,
    q_starts,
    q_lengths,
    d_values,
    d_starts,
    candidates,
    grad_q,
    row_query,
    num_slots,
    num_rows,
    row_blocks,
    DIM: tl.constexpr,
    RANKS: tl.constexpr,
    RANKS_AT_ONCE: tl.constexpr,
    SENTINEL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """grad_q[row] = sum over slots of grad_scores[query, slot] * sum over ranks of d_values[winner of (slot, rank, row)].

    A program owns BLOCK_ROWS rows of one query and sums over slots and ranks in order, so that the result repeats bit by
    bit. Rows of no query are not written: `grad_q` comes filled with zeros. Unless it is None, row_query[row] = the query of
    a row, which the document gradient needs.
    """
    program = tl.program_id(0)
    query = (program // row_blocks).to(tl.int64)
    offset = (program % row_blocks) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    length = tl.load(q_lengths + query)
    live = offset < length
    if (program % row_blocks) * BLOCK_ROWS < length:
        row = tl.load(q_starts + query) + offset
        if row_query is not None:
            tl.store(row_query + row, query.to(tl.int32), mask=live & (tl.program_id(1) == 0))
        column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
        in_dim = column[None, :] < DIM
        total = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
        same = tl.zeros([BLOCK_ROWS], tl.int32)
        for first in range(0, num_slots, UNROLL):
            # Unrolled so that the loads of several slots and ranks are in flight together.
            for i in tl.static_range(UNROLL):
                slot = tl.cast(first + i, tl.int64)
                in_slots = slot < num_slots
                weight = tl.load(grad_scores + query * num_slots + slot + same, mask=live & in_slots, other=0.0)
                document = slot
                if candidates is not None:
                    document = tl.load(candidates + query * num_slots + slot, mask=in_slots, other=0)
                start = tl.load(d_starts + document, mask=in_slots, other=0)
                for first_rank in range(0, RANKS, RANKS_AT_ONCE):
                    for j in tl.static_range(RANKS_AT_ONCE):
                        rank = first_rank + j
                        winner = tl.load(
                            winners + (slot * RANKS + rank) * num_rows + row,
                            mask=live & in_slots & (rank < RANKS),
                            other=SENTINEL,
                        ).to(tl.int32)
                        # A pair of weight 0, as the softmax of a loss leaves many, gathers nothing.
                        won = (winner != SENTINEL) & (weight != 0.0)
                        token = tl.load(
                            d_values + (start + winner)[:, None] * DIM + column[None, :],
                            mask=won[:, None] & in_dim,
                            other=0.0,
                        )
                        total += tl.where(won, weight, 0.0)[:, None] * token.to(tl.float32)
        tl.store(grad_q + row[:, None] * DIM + column[None, :], total, mask=live[:, None] & in_dim)
