"""Largest similarity of every query row to every document, and to groups of its tokens for kth_largest.py."""

import triton.language as tl

from pylate_fastmaxsim.kernels.primitives.running_maximum import maximum_or_nan, running_maximum, same_bits
from pylate_fastmaxsim.kernels.primitives.similarities import held_rows, order_key, similarity_tile
from pylate_fastmaxsim.kernels.runtime.cached_launch import kernel


@kernel("first_row", "num_queries", "num_documents", "num_tiles", "num_rows", "documents_per_program")
def token_maxima_kernel(
    q_values,
    q_rows,
    q_offsets,
    d_values,
    d_rows,
    d_offsets,
    d_starts,
    maxima,
    winners,
    groups,
    first_row,
    num_queries,
    num_documents,
    num_tiles,
    num_rows,
    documents_per_program,
    DIM: tl.constexpr,
    WANT_WINNERS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """maxima[document, row], its token's position in winners[document, row], and groups[row - first_row, document, 8].

    A group holds the tokens of a document whose positions among its live tokens are equal modulo 8, which matrix units
    leave in one thread. Of its maximum the upper half of the key is written; the lowest int16 if the group is empty.
    """
    # Tiles vary fastest, so that programs running together share documents in L2.
    program = tl.program_id(0)
    tile = program % num_tiles
    first_document = (program // num_tiles) * documents_per_program
    num_live = tl.load(q_offsets + num_queries).to(tl.int32)
    local = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    if first_row + tile * BLOCK_M < num_live:
        live = first_row + local < num_live
        row = tl.load(q_rows + first_row + local, mask=live, other=0)
        q_pointers, q_tile = held_rows(q_values, row, live, DIM, BLOCK_K)
        column = tl.arange(0, BLOCK_N)
        in_group = tl.arange(0, 8)
        for document in range(first_document, tl.minimum(first_document + documents_per_program, num_documents)):
            begin = tl.load(d_offsets + document).to(tl.int32)
            length = tl.load(d_offsets + document + 1).to(tl.int32) - begin
            best = tl.full([BLOCK_M, 8], float("-inf"), tl.float32)
            best_first = tl.zeros([BLOCK_M, 8], tl.int32)
            for first in range(0, length, BLOCK_N):
                # Columns past the end repeat the last token of their group, which changes no maximum.
                past = tl.maximum(first + column - (length - 1), 0)
                token = tl.maximum(first + column - (past + 7) // 8 * 8, 0)
                d_row = tl.load(d_rows + begin + token)
                similarity = similarity_tile(
                    q_tile, q_pointers, live, d_values, d_row, DIM, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K
                )
                best, best_first = running_maximum(best, best_first, first, similarity, WANT_WINNERS, BLOCK_M, BLOCK_N)
            if groups is not None:
                # A document of fewer than 8 tokens repeats its first token in the empty groups.
                key = tl.where(in_group[None, :] < length, order_key(best) >> 16, -32768)
                group_out = groups + (local.to(tl.int64) * num_documents + document)[:, None] * 8 + in_group[None, :]
                tl.store(group_out, key.to(tl.int16), mask=live[:, None])
            if length > 0:
                row_best = tl.reduce(best, 1, maximum_or_nan)
                out = tl.cast(document, tl.int64) * num_rows + row
                tl.store(maxima + out, row_best, mask=live)
                if WANT_WINNERS:
                    place = tl.where(same_bits(best, row_best[:, None]), best_first + in_group[None, :], 2147483647)
                    place = tl.minimum(tl.min(place, axis=1), length - 1)
                    winner = tl.load(d_rows + begin + place) - tl.load(d_starts + document)
                    tl.store(winners + out, winner.to(winners.dtype.element_ty), mask=live)


@kernel("num_queries", "num_documents", "num_tiles", "num_rows", "documents_per_program")
def negative_maxima_kernel(
    q_values,
    q_rows,
    q_offsets,
    d_values,
    d_rows,
    d_offsets,
    thresholds,
    maxima,
    winners,
    num_queries,
    num_documents,
    num_tiles,
    num_rows,
    documents_per_program,
    DIM: tl.constexpr,
    WANT_WINNERS: tl.constexpr,
    SENTINEL: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Raises to 0 the negative maxima that pass while another token of the document does not: that one counts as 0.

    This happens only to rows with fewer than k positive similarities in all, which are rare.
    """
    program = tl.program_id(0)
    tile = program % num_tiles
    first_document = (program // num_tiles) * documents_per_program
    num_live = tl.load(q_offsets + num_queries).to(tl.int32)
    index = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    live = index < num_live
    row = tl.load(q_rows + index, mask=live, other=0)
    threshold = tl.load(thresholds + row, mask=live, other=0.0)
    # With -infinity all tokens pass.
    negative = live & (threshold < 0.0) & (threshold > float("-inf"))
    if tl.max(negative.to(tl.int32), axis=0) > 0:
        q_pointers, q_tile = held_rows(q_values, row, live, DIM, BLOCK_K)
        column = tl.arange(0, BLOCK_N)
        for document in range(first_document, tl.minimum(first_document + documents_per_program, num_documents)):
            begin = tl.load(d_offsets + document).to(tl.int32)
            length = tl.load(d_offsets + document + 1).to(tl.int32) - begin
            out = tl.cast(document, tl.int64) * num_rows + row
            best = tl.load(maxima + out, mask=negative & (length > 0), other=0.0)
            candidate = (best < 0.0) & (best >= threshold)
            if tl.max(candidate.to(tl.int32), axis=0) > 0:
                least = tl.full([BLOCK_M], float("inf"), tl.float32)
                for first in range(0, length, BLOCK_N):
                    d_row = tl.load(d_rows + begin + tl.minimum(first + column, length - 1))
                    similarity = similarity_tile(
                        q_tile, q_pointers, live, d_values, d_row, DIM, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K
                    )
                    least = tl.minimum(least, tl.min(similarity, axis=1))
                raised = candidate & (least < threshold)
                tl.store(maxima + out, 0.0, mask=raised)
                if WANT_WINNERS:
                    tl.store(winners + out, SENTINEL, mask=raised)
