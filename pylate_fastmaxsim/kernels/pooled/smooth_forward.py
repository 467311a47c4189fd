"""Forward of softmax and log-sum-exp pooling: similarities stay on the chip, with running sums in place of a maximum."""

import triton
import triton.language as tl

from pylate_fastmaxsim.kernels.primitives.documents import similarities_of_document, span_of_slot, tiles_of_slots
from pylate_fastmaxsim.kernels.primitives.query_tiles import rows_of_tile, store_scores
from pylate_fastmaxsim.kernels.primitives.similarities import without_columns_past_the_end
from pylate_fastmaxsim.kernels.runtime.cached_launch import Launcher

# The largest exponent before the first column. Finite, so that its difference to itself is 0.
_NOTHING = tl.constexpr(-1.0e30)


@triton.jit
def _start(BLOCK_M: tl.constexpr):
    """Largest exponent, sum of exponentials, and sum of these times the similarities, before the first column."""
    zeros = tl.zeros([BLOCK_M, 8], tl.float32)
    return zeros + _NOTHING, zeros, zeros


@triton.jit
def _running_sums(
    top, total, weighted, similarity, scale, LOG_SUM_EXP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The three after more columns ``[BLOCK_M, BLOCK_N]``. Columns that are equal modulo 8 have sums of their own."""
    x = tl.reshape(similarity, [BLOCK_M, BLOCK_N // 8, 8])
    higher = tl.maximum(top, tl.max(x, axis=1) * scale)
    weight = tl.exp2(x * scale - higher[:, None, :])
    shrink = tl.exp2(top - higher)
    total = total * shrink + tl.sum(weight, axis=1)
    if not LOG_SUM_EXP:
        weighted = weighted * shrink + tl.sum(weight * x, axis=1)
    return higher, total, weighted


@triton.jit
def _pooled(top, total, weighted, scale, LOG_SUM_EXP: tl.constexpr):
    """Pooled similarity and log of the sum of exponentials, in base 2, of each row."""
    row_top = tl.max(top, axis=1)
    shrink = tl.exp2(top - row_top[:, None])
    row_total = tl.sum(total * shrink, axis=1)
    log_sum = row_top + tl.log2(row_total)
    value = log_sum / scale if LOG_SUM_EXP else tl.sum(weighted * shrink, axis=1) / row_total
    return value, log_sum


@Launcher
@triton.jit(
    do_not_specialize=["num_queries", "num_slots", "num_tiles", "num_rows", "row_blocks", "documents_per_program"]
)
def smooth_forward_kernel(
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
    log_sums,
    pooled,
    num_queries,
    num_slots,
    num_tiles,
    num_rows,
    row_blocks,
    documents_per_program,
    scale,
    LOG_SUM_EXP: tl.constexpr,
    DIM: tl.constexpr,
    ROWS_PER_QUERY: tl.constexpr,
    ONE_QUERY: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile of query rows against up to 8 documents, one after the other, as in MaxSim's forward.

    `scale` is log2(e) / temperature. log_sums[slot, row] and pooled[slot, row], which log-sum-exp does without, are what
    the backward needs; None: not written.
    """
    HAS_CANDIDATES: tl.constexpr = candidates is not None
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
    start, length = span_of_slot(first_slot, last_slot, d_starts, d_lengths, candidates)
    next_start, next_length = span_of_slot(first_slot + 1, last_slot, d_starts, d_lengths, candidates)
    slot = first_slot
    first = length * 0

    totals = tl.zeros([BLOCK_M, 8], tl.float32)
    top, total, weighted = _start(BLOCK_M)
    for _ in range(num_document_tiles):
        document_tokens = None
        if live_tokens is not None:
            document_tokens = live_tokens + start
        similarity = similarities_of_document(
            q_tile, q_pointers, q_live, d_values + start * DIM, document_tokens, length, first,
            DIM, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        is_last = first + BLOCK_N >= length
        similarity = without_columns_past_the_end(similarity, first, length, BLOCK_N)
        top, total, weighted = _running_sums(top, total, weighted, similarity, scale, LOG_SUM_EXP, BLOCK_M, BLOCK_N)
        if is_last:
            value, log_sum = _pooled(top, total, weighted, scale, LOG_SUM_EXP)
            value = tl.where(length > 0, value, 0.0)
            totals = tl.where(first_slot + place[None, :] == slot, value[:, None], totals)
            here = tl.cast(slot, tl.int64) * num_rows + q_row
            if log_sums is not None:
                tl.store(log_sums + here, tl.where(length > 0, log_sum, 0.0), mask=q_live)
            if pooled is not None:
                tl.store(pooled + here, value, mask=q_live)
            top, total, weighted = _start(BLOCK_M)
        first = tl.where(is_last, 0, first + BLOCK_N)
        slot = tl.where(is_last, slot + 1, slot)
        start = tl.where(is_last, next_start, start)
        length = tl.where(is_last, next_length, length)
        next_start, next_length = span_of_slot(slot + 1, last_slot, d_starts, d_lengths, candidates)

    store_scores(
        scores, totals, q_live, tile, query, first_slot, last_slot, num_queries, num_slots, row_blocks,
        ROWS_PER_QUERY, ONE_QUERY, BLOCK_M,
    )  # fmt: skip
