"""Forward of MaxSim: similarities stay on the chip; scores and the winner of each query row and document are written."""

import triton
import triton.language as tl

from pylate_fastmaxsim.kernels.primitives.documents import document_of_slot, similarities_of_document, tiles_of_slots
from pylate_fastmaxsim.kernels.primitives.query_tiles import rows_of_tile, store_scores
from pylate_fastmaxsim.kernels.primitives.running_maximum import best_of_row, no_maximum, running_maximum
from pylate_fastmaxsim.kernels.runtime.cached_launch import Launcher


@Launcher
@triton.jit(
    do_not_specialize=["num_queries", "num_slots", "num_tiles", "num_rows", "row_blocks", "documents_per_program"]
)
def forward_kernel(
    q_values,
    q_starts,
    q_lengths,
    q_keep,
    d_values,
    d_starts,
    d_lengths,
    live_tokens,
    candidates,
    zero_floor,
    scores,
    winners,
    num_queries,
    num_slots,
    num_tiles,
    num_rows,
    row_blocks,
    documents_per_program,
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
    """A tile of query rows against up to 8 documents, one after the other.

    With `live_tokens`, which lists the live tokens of each document at its start, `d_lengths` counts these only: masked
    tokens are neither loaded nor multiplied.

    The tile holds BLOCK_M // ROWS_PER_QUERY queries, one every ROWS_PER_QUERY rows. With ONE_QUERY (queries longer than
    half a tile, or candidates, since each query has its own) it is one of the `row_blocks` that a query is cut into, and
    `scores` is `[row_blocks, num_queries, num_slots]`. Slot p of `num_slots` is document p, or the p-th candidate of the
    query.

    Matrix units leave the columns of a row that are equal modulo 8 in one thread. So each thread keeps the maximum of
    its own columns over all tiles of a document, and threads exchange maxima once, after the last tile. One loop goes
    over the tiles of all documents, so that the next document is loaded while one ends.
    """
    HAS_CANDIDATES: tl.constexpr = candidates is not None
    # Tiles vary fastest, so that programs running together share documents in L2.
    program = tl.program_id(0)
    tile = program % num_tiles
    first_slot = (program // num_tiles) * documents_per_program

    query, q_row, q_live = rows_of_tile(
        tile, q_starts, q_lengths, q_keep, num_queries, row_blocks, ROWS_PER_QUERY, ONE_QUERY, BLOCK_M
    )
    k = tl.arange(0, BLOCK_K)
    q_pointers = q_values + q_row[:, None] * DIM + k[None, :]
    q_tile = None
    if DIM <= BLOCK_K:
        q_tile = tl.load(q_pointers, mask=q_live[:, None] & (k[None, :] < DIM), other=0.0)

    place = tl.arange(0, 8)
    last_slot = tl.minimum(first_slot + documents_per_program, num_slots) - 1
    if HAS_CANDIDATES:
        candidates += query.to(tl.int64) * num_slots
    num_document_tiles = tiles_of_slots(first_slot, last_slot, d_starts, d_lengths, candidates, BLOCK_N)

    # One document ahead, so that no load waits for its address.
    start, length, floor = document_of_slot(first_slot, last_slot, d_starts, d_lengths, candidates, zero_floor)
    next_start, next_length, next_floor = document_of_slot(
        first_slot + 1, last_slot, d_starts, d_lengths, candidates, zero_floor
    )
    slot = first_slot
    first = length * 0

    totals = tl.zeros([BLOCK_M, 8], tl.float32)
    # First column of the group of 8 that holds the best; the column within the group is the place in `best`.
    best, group = no_maximum(floor, BLOCK_M)
    for _ in range(num_document_tiles):
        document_tokens = None
        if live_tokens is not None:
            document_tokens = live_tokens + start
        similarity = similarities_of_document(
            q_tile, q_pointers, q_live, d_values + start * DIM, document_tokens, length, first,
            DIM, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        best, group = running_maximum(best, group, first, similarity, WANT_WINNERS, BLOCK_M, BLOCK_N)
        is_last = first + BLOCK_N >= length
        if is_last:
            value, winner = best_of_row(best, group, length, document_tokens, WANT_WINNERS, SENTINEL, BLOCK_M)
            value = tl.where(length > 0, value, 0.0)
            totals = tl.where(first_slot + place[None, :] == slot, value[:, None], totals)
            if WANT_WINNERS:
                tl.store(winners + tl.cast(slot, tl.int64) * num_rows + q_row, winner, mask=q_live)
            best, group = no_maximum(next_floor, BLOCK_M)
        first = tl.where(is_last, 0, first + BLOCK_N)
        slot = tl.where(is_last, slot + 1, slot)
        start = tl.where(is_last, next_start, start)
        length = tl.where(is_last, next_length, length)
        next_start, next_length, next_floor = document_of_slot(
            slot + 1, last_slot, d_starts, d_lengths, candidates, zero_floor
        )

    store_scores(
        scores, totals, q_live, tile, query, first_slot, last_slot, num_queries, num_slots, row_blocks,
        ROWS_PER_QUERY, ONE_QUERY, BLOCK_M,
    )  # fmt: skip
