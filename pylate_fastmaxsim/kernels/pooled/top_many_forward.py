"""Forward of top-k pooling for k up to 64: the k best of a tile of similarities are merged with the k best so far."""

import triton.language as tl

from pylate_fastmaxsim.kernels.primitives.documents import similarities_of_document, span_of_slot
from pylate_fastmaxsim.kernels.primitives.query_tiles import rows_of_tile, store_scores
from pylate_fastmaxsim.kernels.primitives.similarities import held_rows, key_value, order_key
from pylate_fastmaxsim.kernels.runtime.cached_launch import kernel

# Smaller than the key of any column.
_NOTHING = tl.constexpr(-(2**63))
# All bits of a position turned over, so that lower ones are larger.
_REVERSED = tl.constexpr(2147483647)


@kernel("num_queries", "num_slots", "num_tiles", "num_rows", "row_blocks", "documents_per_program")
def top_many_kernel(
    q_values,
    q_starts,
    q_lengths,
    q_keep,
    d_values,
    d_starts,
    d_lengths,
    live_tokens,
    candidates,
    scores,
    winners,
    num_queries,
    num_slots,
    num_tiles,
    num_rows,
    row_blocks,
    documents_per_program,
    K: tl.constexpr,
    KEPT: tl.constexpr,
    DIM: tl.constexpr,
    ROWS_PER_QUERY: tl.constexpr,
    ONE_QUERY: tl.constexpr,
    WANT_WINNERS: tl.constexpr,
    SENTINEL: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Means of the K largest similarities, and their tokens in winners[slot, rank, row], as in MaxSim's forward.

    A column is a number of 64 bits: the order of its similarity, then that of its position, lower ones first. KEPT is the
    power of two from K on, and at most BLOCK_N.
    """
    HAS_CANDIDATES: tl.constexpr = candidates is not None
    program = tl.program_id(0)
    tile = program % num_tiles
    first_slot = (program // num_tiles) * documents_per_program
    query, q_row, q_live = rows_of_tile(
        tile, q_starts, q_lengths, q_keep, num_queries, row_blocks, ROWS_PER_QUERY, ONE_QUERY, BLOCK_M
    )
    q_pointers, q_tile = held_rows(q_values, q_row, q_live, DIM, BLOCK_K)
    column = tl.arange(0, BLOCK_N)
    place = tl.arange(0, 8)
    last_slot = tl.minimum(first_slot + documents_per_program, num_slots) - 1
    if HAS_CANDIDATES:
        candidates += query.to(tl.int64) * num_slots
    totals = tl.zeros([BLOCK_M, 8], tl.float32)
    for slot in range(first_slot, last_slot + 1):
        start, length = span_of_slot(slot, last_slot, d_starts, d_lengths, candidates)
        document_tokens = None
        if live_tokens is not None:
            document_tokens = live_tokens + start
        best = tl.full([BLOCK_M, KEPT], _NOTHING, tl.int64)
        for first in range(0, length, BLOCK_N):
            similarity = similarities_of_document(
                q_tile, q_pointers, q_live, d_values + start * DIM, document_tokens, length, first,
                DIM, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            key = (order_key(similarity).to(tl.int64) << 32) | ((first + column) ^ _REVERSED)[None, :].to(tl.int64)
            key = tl.where((first + column < length)[None, :], key, _NOTHING)
            # One ascends, the other descends: the larger of each pair are the largest of both, and need a merge only.
            best = tl.bitonic_merge(tl.maximum(best, tl.topk(key, KEPT)))
        rank = KEPT - 1 - tl.arange(0, KEPT)
        counted = rank < tl.minimum(length, K)
        value = key_value((best >> 32).to(tl.int32))
        total = tl.sum(tl.where(counted[None, :], value, 0.0), axis=1) / tl.maximum(tl.minimum(length, K), 1)
        totals = tl.where(first_slot + place[None, :] == slot, total[:, None], totals)
        if WANT_WINNERS:
            winner = tl.where(counted[None, :], best.to(tl.int32) ^ _REVERSED, SENTINEL)
            if live_tokens is not None:
                winner = tl.load(document_tokens + winner, mask=winner != SENTINEL, other=SENTINEL)
            here = winners + (tl.cast(slot, tl.int64) * K + rank)[None, :] * num_rows + q_row[:, None]
            tl.store(here, winner, mask=q_live[:, None] & (rank < K)[None, :])

    store_scores(
        scores, totals, q_live, tile, query, first_slot, last_slot, num_queries, num_slots, row_blocks,
        ROWS_PER_QUERY, ONE_QUERY, BLOCK_M,
    )  # fmt: skip
