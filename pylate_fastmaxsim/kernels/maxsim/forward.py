"""Forward of MaxSim, of compressed MaxSim and of the other poolings: similarities stay on the chip."""

import triton.language as tl

from pylate_fastmaxsim.kernels.primitives.documents import document_of_slot, similarities_of_document, tiles_of_slots
from pylate_fastmaxsim.kernels.primitives.query_tiles import rows_of_tile, store_scores
from pylate_fastmaxsim.kernels.primitives.running_best import mean_of_best, no_best, running_best
from pylate_fastmaxsim.kernels.primitives.running_maximum import best_of_row, no_maximum, running_maximum
from pylate_fastmaxsim.kernels.primitives.running_sums import no_sums, pooled_of_row, running_sums
from pylate_fastmaxsim.kernels.primitives.similarities import held_rows, without_columns_past_the_end
from pylate_fastmaxsim.kernels.primitives.stored import similarities_as_stored
from pylate_fastmaxsim.kernels.runtime.cached_launch import kernel


@kernel("num_queries", "num_slots", "num_tiles", "num_rows", "row_blocks", "documents_per_program")
def forward_kernel(
    q_values,
    q_scales,
    q_starts,
    q_lengths,
    q_keep,
    d_values,
    scales,
    codes,
    centroids,
    byte_words,
    d_starts,
    d_lengths,
    live_tokens,
    candidates,
    zero_floor,
    scores,
    winners,
    log_sums,
    pooled,
    num_queries,
    num_slots,
    num_tiles,
    num_rows,
    row_blocks,
    documents_per_program,
    scale,
    POOLING: tl.constexpr,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    BITS: tl.constexpr,
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
    """Scores of a tile of query rows with up to 8 documents, one after the other, and what a backward needs.

    With `live_tokens`, which lists the live tokens of each document at its start, `d_lengths` counts these only: masked
    tokens are neither loaded nor multiplied.

    The tile holds BLOCK_M // ROWS_PER_QUERY queries, one every ROWS_PER_QUERY rows. With ONE_QUERY (queries longer than
    half a tile, or candidates, since each query has its own) it is one of the `row_blocks` that a query is cut into, and
    `scores` is `[row_blocks, num_queries, num_slots]`. Slot p of `num_slots` is document p, or the p-th candidate of the
    query.

    FORMAT: what documents are stored as, "vectors" or as in stored.py. Scales of query rows (`q_scales`) are not negative,
    so they wait until the maximum is known, and so do those of int8 documents with one scale each.

    POOLING: "max" and "top k" with K up to 4 write winners[slot, row] and winners[slot, rank, row] (WANT_WINNERS). "softmax"
    and "log-sum-exp" take log2(e) / temperature as `scale` and write log_sums[slot, row] and pooled[slot, row] unless None.

    Matrix units leave the columns of a row that are equal modulo 8 in one thread. So each thread keeps the state of
    its own columns over all tiles of a document, and threads merge their states once, after the last tile. One loop goes
    over the tiles of all documents, so that the next document is loaded while one ends.
    """
    # Tiles vary fastest, so that programs running together share documents in L2.
    program = tl.program_id(0)
    tile = program % num_tiles
    first_slot = (program // num_tiles) * documents_per_program

    query, q_row, q_live = rows_of_tile(
        tile, q_starts, q_lengths, q_keep, num_queries, row_blocks, ROWS_PER_QUERY, ONE_QUERY, BLOCK_M
    )
    q_pointers, q_tile = held_rows(q_values, q_row, q_live, DIM, BLOCK_K)

    if q_scales is not None:
        q_scale = tl.load(q_scales + q_row, mask=q_live, other=0.0)
    place = tl.arange(0, 8)
    last_slot = tl.minimum(first_slot + documents_per_program, num_slots) - 1
    if candidates is not None:
        candidates += query.to(tl.int64) * num_slots
    num_document_tiles = tiles_of_slots(first_slot, last_slot, d_starts, d_lengths, candidates, BLOCK_N)

    # One document ahead, so that no load waits for its address.
    start, length, floor = document_of_slot(first_slot, last_slot, d_starts, d_lengths, candidates, zero_floor)
    next_start, next_length, next_floor = document_of_slot(
        first_slot + 1, last_slot, d_starts, d_lengths, candidates, zero_floor
    )
    slot = first_slot
    first = length * 0
    # Where a document has one scale, maxima of int8 are those of whole numbers.
    WHOLE: tl.constexpr = FORMAT == "int8" and not PER_TOKEN
    if WHOLE:
        floor = tl.full([], -(2**31), tl.int32)

    totals = tl.zeros([BLOCK_M, 8], tl.float32)
    if POOLING == "max":
        # First column of the group of 8 that holds the best; the column within the group is the place in `best`.
        best, group = no_maximum(floor, BLOCK_M)
    elif POOLING == "top k":
        v0, v1, v2, v3, g0, g1, g2, g3, not_finite = no_best(BLOCK_M)
    else:
        top, total, weighted = no_sums(BLOCK_M)
    for _ in range(num_document_tiles):
        document_tokens = None
        if live_tokens is not None:
            document_tokens = live_tokens + start
        if FORMAT == "vectors":
            similarity = similarities_of_document(
                q_tile, q_pointers, q_live, d_values + start * DIM, document_tokens, length, first,
                DIM, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        else:
            similarity = similarities_as_stored(
                q_tile, q_pointers, q_live, d_values, scales, codes, centroids, byte_words, start, document_tokens,
                length, first, FORMAT, PER_TOKEN, BITS, DIM, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        if POOLING == "max":
            best, group = running_maximum(best, group, first, similarity, WANT_WINNERS, BLOCK_M, BLOCK_N)
        else:
            similarity = without_columns_past_the_end(similarity, first, length, BLOCK_N)
            if POOLING == "top k":
                v0, v1, v2, v3, g0, g1, g2, g3, not_finite = running_best(
                    v0, v1, v2, v3, g0, g1, g2, g3, not_finite, first, similarity, WANT_WINNERS, BLOCK_M, BLOCK_N
                )
            else:
                top, total, weighted = running_sums(
                    top, total, weighted, similarity, scale, POOLING == "log-sum-exp", BLOCK_M, BLOCK_N
                )
        is_last = first + BLOCK_N >= length
        if is_last:
            if POOLING == "max":
                value, winner = best_of_row(best, group, length, document_tokens, WANT_WINNERS, SENTINEL, BLOCK_M)
                if WHOLE:
                    document = tl.cast(slot, tl.int64)
                    if candidates is not None:
                        document = tl.load(candidates + document)
                    value = value.to(tl.float32) * tl.load(scales + document)
                if q_scales is not None:
                    value *= q_scale
                value = tl.where(length > 0, value, 0.0)
            elif POOLING == "top k":
                value = mean_of_best(
                    v0, v1, v2, v3, g0, g1, g2, g3, not_finite, length, document_tokens, winners, slot, num_rows,
                    q_row, q_live, K, WANT_WINNERS, SENTINEL,
                )  # fmt: skip
            else:
                value, log_sum = pooled_of_row(top, total, weighted, scale, POOLING == "log-sum-exp")
                value = tl.where(length > 0, value, 0.0)
            totals = tl.where(first_slot + place[None, :] == slot, value[:, None], totals)
            here = tl.cast(slot, tl.int64) * num_rows + q_row
            if POOLING == "max":
                if WANT_WINNERS:
                    tl.store(winners + here, winner, mask=q_live)
                best, group = no_maximum(floor if WHOLE else next_floor, BLOCK_M)
            elif POOLING == "top k":
                v0, v1, v2, v3, g0, g1, g2, g3, not_finite = no_best(BLOCK_M)
            else:
                if log_sums is not None:
                    tl.store(log_sums + here, tl.where(length > 0, log_sum, 0.0), mask=q_live)
                if pooled is not None:
                    tl.store(pooled + here, value, mask=q_live)
                top, total, weighted = no_sums(BLOCK_M)
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
