"""MaxSim over compressed documents: the forward of MaxSim, with tiles of similarities from what is stored."""

import triton
import triton.language as tl

from pylate_fastmaxsim.kernels.compressed.decoded import residual_vectors
from pylate_fastmaxsim.kernels.primitives.documents import span_of_slot, tiles_of_slots
from pylate_fastmaxsim.kernels.primitives.query_tiles import rows_of_tile, store_scores
from pylate_fastmaxsim.kernels.primitives.running_maximum import best_of_row, no_maximum, running_maximum
from pylate_fastmaxsim.kernels.runtime.cached_launch import Launcher

# 1.5 * 2**23. A whole number of at most 2**22 that is added to its bits makes them those of the sum: sums of int8 products
# become floats by one subtraction, faster than by a conversion.
_OFFSET = tl.constexpr(12582912.0)
_OFFSET_BITS = tl.constexpr(0x4B400000)


@triton.jit
def _products(
    total,
    q_tile,
    q_pointers,
    q_live,
    d_pointers,
    DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """total + products of int8 (int32) or of e4m3 (float32)."""
    k = tl.arange(0, BLOCK_K)
    if DIM <= BLOCK_K:
        d_tile = tl.load(d_pointers, mask=k[None, :] < DIM, other=0.0)
        total = tl.dot(q_tile, tl.trans(d_tile), total, out_dtype=total.dtype)
    else:
        for first_k in range(0, DIM, BLOCK_K):
            in_dim = first_k + k[None, :] < DIM
            q_chunk = tl.load(q_pointers + first_k, mask=q_live[:, None] & in_dim, other=0.0)
            d_chunk = tl.load(d_pointers + first_k, mask=in_dim, other=0.0)
            total = tl.dot(q_chunk, tl.trans(d_chunk), total, out_dtype=total.dtype)
    return total


@Launcher
@triton.jit(
    do_not_specialize=["num_queries", "num_slots", "num_tiles", "num_rows", "row_blocks", "documents_per_program"]
)
def compressed_forward_kernel(
    q_values,
    q_scales,
    q_starts,
    q_lengths,
    q_keep,
    stored,
    scales,
    codes,
    centroids,
    byte_words,
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
    FORMAT: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    BITS: tl.constexpr,
    DIM: tl.constexpr,
    ROWS_PER_QUERY: tl.constexpr,
    ONE_QUERY: tl.constexpr,
    WANT_WINNERS: tl.constexpr,
    SENTINEL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """scores[query, slot], and winners as of MaxSim's forward, whose tiles, slots and tensors these are.

    FORMAT is "int8", "fp8" or "residual" (d of at most BLOCK_K). Scales of query rows are not negative, so they wait until the
    maximum is known, and so do those of documents (PER_TOKEN False).
    """
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
    if q_scales is not None:
        q_scale = tl.load(q_scales + q_row, mask=q_live, other=0.0)

    # Where a document has one scale, maxima of int8 are those of whole numbers.
    WHOLE: tl.constexpr = FORMAT == "int8" and not PER_TOKEN
    OFFSET: tl.constexpr = PER_TOKEN and 127 * 127 * DIM <= 2**22
    place = tl.arange(0, 8)
    column = tl.arange(0, BLOCK_N)
    last_slot = tl.minimum(first_slot + documents_per_program, num_slots) - 1
    if candidates is not None:
        candidates += query.to(tl.int64) * num_slots
    num_document_tiles = tiles_of_slots(first_slot, last_slot, d_starts, d_lengths, candidates, BLOCK_N)

    # One document ahead, so that no load waits for its address.
    start, length = span_of_slot(first_slot, last_slot, d_starts, d_lengths, candidates)
    next_start, next_length = span_of_slot(first_slot + 1, last_slot, d_starts, d_lengths, candidates)
    slot = first_slot
    first = length * 0

    totals = tl.zeros([BLOCK_M, 8], tl.float32)
    lowest = tl.full([], -(2**31) if WHOLE else float("-inf"), tl.int32 if WHOLE else tl.float32)
    best, group = no_maximum(lowest, BLOCK_M)
    for _ in range(num_document_tiles):
        # Columns past the end repeat the last token, which changes no maximum and needs no mask.
        last_token = tl.maximum(length, 1) - 1
        document_tokens = None
        if live_tokens is None:
            row = start + first + tl.minimum(column, last_token - first).to(tl.int64)
        else:
            document_tokens = live_tokens + start
            token = tl.load(document_tokens + tl.minimum(first + column, last_token), mask=length > 0, other=0)
            row = start + token.to(tl.int64)
        if FORMAT == "residual":
            d_tile = residual_vectors(
                row, stored, codes, centroids, byte_words, scales, DIM, BITS, BLOCK_N, BLOCK_K
            )  # fmt: skip
            similarity = tl.dot(q_tile, tl.trans(d_tile.to(q_tile.dtype)))
        else:
            d_pointers = stored + row[:, None] * DIM + k[None, :]
            if FORMAT == "int8":
                total = tl.full([BLOCK_M, BLOCK_N], _OFFSET_BITS if OFFSET else 0, tl.int32)
            else:
                total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            similarity = _products(total, q_tile, q_pointers, q_live, d_pointers, DIM, BLOCK_K)
            if PER_TOKEN:
                if OFFSET:
                    similarity = similarity.to(tl.float32, bitcast=True) - _OFFSET
                similarity = similarity.to(tl.float32) * tl.load(scales + row)[None, :]
        best, group = running_maximum(best, group, first, similarity, WANT_WINNERS, BLOCK_M, BLOCK_N)
        is_last = first + BLOCK_N >= length
        if is_last:
            value, winner = best_of_row(best, group, length, document_tokens, WANT_WINNERS, SENTINEL, BLOCK_M)
            if WHOLE:
                document = tl.cast(slot, tl.int64)
                if candidates is not None:
                    document = tl.load(candidates + document)
                value = value.to(tl.float32) * tl.load(scales + document)
            if q_scales is not None:
                value *= q_scale
            value = tl.where(length > 0, value, 0.0)
            totals = tl.where(first_slot + place[None, :] == slot, value[:, None], totals)
            if WANT_WINNERS:
                tl.store(winners + tl.cast(slot, tl.int64) * num_rows + q_row, winner, mask=q_live)
            best, group = no_maximum(lowest, BLOCK_M)
        first = tl.where(is_last, 0, first + BLOCK_N)
        slot = tl.where(is_last, slot + 1, slot)
        start = tl.where(is_last, next_start, start)
        length = tl.where(is_last, next_length, length)
        next_start, next_length = span_of_slot(slot + 1, last_slot, d_starts, d_lengths, candidates)

    store_scores(
        scores, totals, q_live, tile, query, first_slot, last_slot, num_queries, num_slots, row_blocks,
        ROWS_PER_QUERY, ONE_QUERY, BLOCK_M,
    )  # fmt: skip
