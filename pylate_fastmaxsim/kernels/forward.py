"""Forward of MaxSim: similarities stay on the chip; what is written is a score per pair and a winner per query row."""

import triton
import triton.language as tl

from pylate_fastmaxsim.kernels.products import product


@triton.jit
def maximum_or_nan(a, b):
    # One instruction (max.NaN) from sm_80 on; a plain maximum would hide a NaN of a diverged run.
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def live_tokens_kernel(d_starts, d_lengths, d_keep, live_tokens, live_lengths, BLOCK: tl.constexpr):
    """Lists the tokens of a document that count, in order, at live_tokens[start of the document]."""
    document = tl.program_id(0)
    start = tl.load(d_starts + document)
    length = tl.load(d_lengths + document).to(tl.int32)
    count = 0
    for first in range(0, length, BLOCK):
        token = first + tl.arange(0, BLOCK)
        live = (tl.load(d_keep + start + token, mask=token < length, other=0) != 0).to(tl.int32)
        tl.store(live_tokens + start + count + tl.cumsum(live, axis=0) - 1, token, mask=live > 0)
        count += tl.sum(live, axis=0)
    tl.store(live_lengths + document, count)


@triton.jit
def _same_bits(a, b):
    return a.to(tl.int32, bitcast=True) == b.to(tl.int32, bitcast=True)


@triton.jit
def _first_maximum(a, a_index, b, b_index):
    """The larger of two values and its index; `a` comes first and wins a tie, and so does the first NaN."""
    maximum = maximum_or_nan(a, b)
    # Bits, because every comparison with a NaN is false.
    return maximum, tl.where(_same_bits(maximum, a), a_index, b_index)


@triton.jit
def _best_token(
    q_tile,
    q_pointers,
    row_live,
    document,
    live_tokens,
    document_length,
    floor,
    DIM: tl.constexpr,
    WANT_WINNERS: tl.constexpr,
    SENTINEL: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Maximum and first winner of BLOCK_M query rows over one document; `floor` is what the maximum starts from.

    `document` points to the first token; `live_tokens` lists the tokens that count, or is None for all.

    Matrix units leave the columns that are equal modulo 8 of a row in one thread. So each thread keeps the best of its
    own columns, over all tiles of the document, and threads exchange theirs once, after the last tile.
    """
    GROUPS: tl.constexpr = BLOCK_N // 8
    best = tl.zeros([BLOCK_M, 8], tl.float32) + floor
    # First column of the group of 8 that holds the best; the column within the group is the place in `best`.
    group = tl.zeros([BLOCK_M, 8], tl.int32)
    group_column = 8 * tl.arange(0, GROUPS)[None, :, None] + tl.zeros([BLOCK_M, GROUPS, 8], tl.int32)
    column = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    for first in range(0, document_length, BLOCK_N):
        # Columns past the end repeat the last token, which changes no maximum: a ragged end costs no mask.
        if live_tokens is None:
            row = tl.minimum(column, document_length - 1 - first)
            d_pointers = document + tl.cast(first, tl.int64) * DIM + row[:, None] * DIM + k[None, :]
        else:
            row = tl.load(live_tokens + tl.minimum(first + column, document_length - 1))
            d_pointers = document + row.to(tl.int64)[:, None] * DIM + k[None, :]
        similarity = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if DIM <= BLOCK_K:
            d_tile = tl.load(d_pointers, mask=k[None, :] < DIM, other=0.0)
            similarity = product(q_tile, tl.trans(d_tile), similarity, PRECISION)
        else:
            for first_k in range(0, DIM, BLOCK_K):
                in_dim = first_k + k[None, :] < DIM
                q_chunk = tl.load(q_pointers + first_k, mask=row_live[:, None] & in_dim, other=0.0)
                d_chunk = tl.load(d_pointers + first_k, mask=in_dim, other=0.0)
                similarity = product(q_chunk, tl.trans(d_chunk), similarity, PRECISION)
        similarity = tl.reshape(similarity, [BLOCK_M, GROUPS, 8])
        if WANT_WINNERS:
            tile_best, tile_group = tl.reduce((similarity, group_column), 1, _first_maximum)
            best, group = _first_maximum(best, group, tile_best, first + tile_group)
        else:
            best = maximum_or_nan(best, tl.reduce(similarity, 1, maximum_or_nan))
    row_best = tl.reduce(best, 1, maximum_or_nan)
    winner = tl.full([BLOCK_M], SENTINEL, tl.int32)
    if WANT_WINNERS:
        candidate = tl.where(_same_bits(best, row_best[:, None]), group + tl.arange(0, 8)[None, :], 2147483647)
        winner = tl.minimum(tl.min(candidate, axis=1), document_length - 1)
        # A maximum that does not exceed this has no winner; without a floor any live token can win (nothing is <= NaN).
        limit = tl.where(document_length == 0, 0.0, tl.where(floor == 0.0, 0.0, float("nan")))
        winner = tl.where(row_best <= limit, SENTINEL, winner)
        if live_tokens is not None:
            winner = tl.load(live_tokens + winner, mask=winner != SENTINEL, other=SENTINEL)
    return tl.where(row_live & (document_length > 0), row_best, 0.0), winner


@triton.jit(do_not_specialize=["num_queries", "num_slots", "num_tiles", "num_rows"])
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
    DIM: tl.constexpr,
    SLOT: tl.constexpr,
    LONG_QUERIES: tl.constexpr,
    WANT_WINNERS: tl.constexpr,
    SENTINEL: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOCUMENTS_PER_PROGRAM: tl.constexpr,
):
    """A tile of query rows against a few documents.

    With `live_tokens`, a list for each document at its start, `d_lengths` counts the live tokens only:
    masked ones are neither loaded nor multiplied.

    The tile holds BLOCK_M // SLOT queries, one every SLOT rows (one query where candidates are given,
    as each query then has documents of its own). Slot p of `num_slots` is document p, or the p-th
    candidate of the query. Queries longer than a tile are taken BLOCK_M rows at a time.
    """
    HAS_CANDIDATES: tl.constexpr = candidates is not None
    QUERIES: tl.constexpr = 1 if HAS_CANDIDATES else BLOCK_M // SLOT
    # Tiles vary fastest, so that programs running together share documents in L2.
    program = tl.program_id(0)
    tile = program % num_tiles
    first_slot = (program // num_tiles) * DOCUMENTS_PER_PROGRAM

    row_in_tile = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    if QUERIES == 1:
        offset = row_in_tile
        q_start = tl.load(q_starts + tile)
        q_length = tl.load(q_lengths + tile).to(tl.int32)
    else:
        query = tile * QUERIES + row_in_tile // SLOT
        offset = row_in_tile % SLOT
        q_start = tl.load(q_starts + query, mask=query < num_queries, other=0)
        q_length = tl.load(q_lengths + query, mask=query < num_queries, other=0).to(tl.int32)

    q_row = q_start + offset
    q_live = offset < q_length
    if q_keep is not None:
        q_live = q_live & (tl.load(q_keep + q_row, mask=q_live, other=0) != 0)
    q_pointers = q_values + q_row[:, None] * DIM + k[None, :]
    q_tile = None
    if DIM <= BLOCK_K and not LONG_QUERIES:
        q_tile = tl.load(q_pointers, mask=q_live[:, None] & (k[None, :] < DIM), other=0.0)

    for slot in range(first_slot, tl.minimum(first_slot + DOCUMENTS_PER_PROGRAM, num_slots)):
        document = tl.cast(slot, tl.int64)
        if HAS_CANDIDATES:
            document = tl.load(candidates + tile.to(tl.int64) * num_slots + slot)
        document_start = tl.load(d_starts + document)
        document_length = tl.load(d_lengths + document).to(tl.int32)
        document_tokens = None
        if live_tokens is not None:
            document_tokens = live_tokens + document_start
        floor = tl.full([], float("-inf"), tl.float32)
        if zero_floor is not None:
            floor = tl.where(tl.load(zero_floor + document) != 0, 0.0, floor)
        if LONG_QUERIES:
            total = tl.zeros([BLOCK_M], tl.float32)
            for first_row in range(0, q_length, BLOCK_M):
                chunk_row = q_start + first_row + offset
                live = offset + first_row < q_length
                if q_keep is not None:
                    live = live & (tl.load(q_keep + chunk_row, mask=live, other=0) != 0)
                pointers = q_values + (q_start + first_row) * DIM + offset[:, None] * DIM + k[None, :]
                chunk_tile = None
                if DIM <= BLOCK_K:
                    chunk_tile = tl.load(pointers, mask=live[:, None] & (k[None, :] < DIM), other=0.0)
                value, winner = _best_token(
                    chunk_tile, pointers, live, d_values + document_start * DIM, document_tokens, document_length, floor,
                    DIM, WANT_WINNERS, SENTINEL, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
                )  # fmt: skip
                total += value
                if WANT_WINNERS:
                    tl.store(winners + tl.cast(slot, tl.int64) * num_rows + chunk_row, winner, mask=live)
        else:
            total, winner = _best_token(
                q_tile, q_pointers, q_live, d_values + document_start * DIM, document_tokens, document_length, floor,
                DIM, WANT_WINNERS, SENTINEL, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            if WANT_WINNERS:
                tl.store(winners + tl.cast(slot, tl.int64) * num_rows + q_row, winner, mask=q_live)
        if QUERIES == 1:
            tl.store(scores + tile.to(tl.int64) * num_slots + slot, tl.sum(total, axis=0))
        else:
            score = tl.sum(tl.reshape(total, [QUERIES, SLOT]), axis=1)
            tile_query = tile * QUERIES + tl.arange(0, QUERIES)
            tl.store(scores + tile_query.to(tl.int64) * num_slots + slot, score, mask=tile_query < num_queries)
