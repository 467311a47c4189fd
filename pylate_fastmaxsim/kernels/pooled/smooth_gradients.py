"""Backward of softmax and log-sum-exp pooling: tiles of similarities are computed again, and weigh rows.

With w = softmax(S / temperature) = exp2(S * scale - log_sum) and the gradient g of a score, a similarity S of softmax
pooling to p has the gradient g w (1 + (S - p) / temperature) = w (constant + slope S), and of log-sum-exp g w.
"""

import triton
import triton.language as tl

from pylate_fastmaxsim.kernels.primitives.documents import span_of_slot, tiles_of_slots
from pylate_fastmaxsim.kernels.primitives.matmul import product, split
from pylate_fastmaxsim.kernels.primitives.similarities import held_rows, inner_products
from pylate_fastmaxsim.kernels.runtime.cached_launch import kernel


@kernel("num_slots", "num_rows", "row_blocks")
def coefficients_kernel(
    grad_scores,
    pooled,
    q_starts,
    q_lengths,
    constants,
    slopes,
    num_slots,
    num_rows,
    row_blocks,
    over_temperature,
    BLOCK_S: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """constants[slot, row] and slopes[slot, row], which log-sum-exp does without (`pooled` and `slopes` are None)."""
    query = (tl.program_id(0) // row_blocks).to(tl.int64)
    offset = (tl.program_id(0) % row_blocks) * BLOCK_R + tl.arange(0, BLOCK_R)
    slot = tl.program_id(1) * BLOCK_S + tl.arange(0, BLOCK_S)
    inside = (slot < num_slots)[:, None] & (offset < tl.load(q_lengths + query))[None, :]
    here = slot.to(tl.int64)[:, None] * num_rows + (tl.load(q_starts + query) + offset)[None, :]
    constant = tl.load(grad_scores + query * num_slots + slot, mask=slot < num_slots, other=0.0)[:, None]
    constant = tl.broadcast_to(constant, [BLOCK_S, BLOCK_R])
    if pooled is not None:
        slope = constant * over_temperature
        constant -= slope * tl.load(pooled + here, mask=inside, other=0.0)
        tl.store(slopes + here, slope, mask=inside)
    tl.store(constants + here, constant, mask=inside)


@triton.jit
def _weights(similarity, log_sum, constant, slope, scale, HAS_SLOPE: tl.constexpr):
    weight = tl.exp2(similarity * scale - log_sum)
    if HAS_SLOPE:
        constant += slope * similarity
    return weight * constant


@triton.jit
def _add_product(total, weight, rows, PRECISION: tl.constexpr):
    """total + weight @ rows. Weights are rounded to bf16 as their rows are; those of fp16 rows keep 16 bits."""
    if rows.dtype == tl.float32:
        total = product(weight, rows, total, PRECISION)
    else:
        high = weight.to(tl.bfloat16)
        if rows.dtype == tl.float16:
            low = (weight - high.to(tl.float32)).to(tl.bfloat16)
            rows, rest = split(rows.to(tl.float32))
            total = tl.dot(high, rest.to(tl.bfloat16), total)
            total = tl.dot(low, rows, total)
        total = tl.dot(high, rows, total)
    return total


@triton.jit
def _coefficients(log_sums, constants, slopes, here, mask):
    """Log of the sum of exponentials, constant and slope of query rows; without `slopes` the slope is the constant."""
    log_sum = tl.load(log_sums + here, mask=mask, other=0.0)
    constant = tl.load(constants + here, mask=mask, other=0.0)
    slope = constant
    if slopes is not None:
        slope = tl.load(slopes + here, mask=mask, other=0.0)
    return log_sum, constant, slope


@kernel("num_slots", "num_tiles", "num_rows", "row_blocks", "num_queries", "slots_per_part")
def smooth_query_gradient_kernel(
    q_values,
    q_rows,
    q_offsets,
    q_starts,
    q_lengths,
    q_keep,
    d_values,
    d_starts,
    d_lengths,
    live_tokens,
    candidates,
    log_sums,
    constants,
    slopes,
    grad_parts,
    num_slots,
    num_tiles,
    num_rows,
    row_blocks,
    num_queries,
    slots_per_part,
    scale,
    DIM: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """grad_parts[part, row] = gradient of a tile of query rows from a part of the slots, of BLOCK_D numbers of a vector.

    Without candidates the rows of all queries stand one after the other: those that `q_rows` lists, as many as the last
    of `q_offsets` says, or all where it is None. With candidates a tile is one of the `row_blocks` of a query.
    """
    HAS_CANDIDATES: tl.constexpr = candidates is not None
    tile = tl.program_id(0) % num_tiles
    part = tl.program_id(0) // num_tiles
    local = tl.arange(0, BLOCK_M)
    if HAS_CANDIDATES:
        query = (tile // row_blocks).to(tl.int64)
        offset = (tile % row_blocks) * BLOCK_M + local
        q_row = tl.load(q_starts + query) + offset
        q_live = offset < tl.load(q_lengths + query)
        if q_keep is not None:
            q_live = q_live & (tl.load(q_keep + q_row, mask=q_live, other=0) != 0)
        candidates += query * num_slots
        some_live = (tile % row_blocks) * BLOCK_M < tl.load(q_lengths + query)
    else:
        index = tile * BLOCK_M + local
        num_live = num_rows
        if q_rows is not None:
            num_live = tl.load(q_offsets + num_queries).to(tl.int32)
        q_live = index < num_live
        q_row = index
        if q_rows is not None:
            q_row = tl.load(q_rows + index, mask=q_live, other=0)
        q_row = q_row.to(tl.int64)
        some_live = tile * BLOCK_M < num_live
    if some_live:
        k = tl.arange(0, BLOCK_K)
        q_pointers, q_tile = held_rows(q_values, q_row, q_live, DIM, BLOCK_K)
        column = tl.arange(0, BLOCK_N)
        out = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
        first_slot = part * slots_per_part
        last_slot = tl.minimum(first_slot + slots_per_part, num_slots) - 1
        num_document_tiles = 0
        for begin in range(first_slot, last_slot + 1, 8):
            num_document_tiles += tiles_of_slots(begin, last_slot, d_starts, d_lengths, candidates, BLOCK_N)
        start, length = span_of_slot(first_slot, last_slot, d_starts, d_lengths, candidates)
        next_start, next_length = span_of_slot(first_slot + 1, last_slot, d_starts, d_lengths, candidates)
        slot = first_slot
        first = length * 0
        total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for _ in range(num_document_tiles):
            # Columns past the end repeat the last token and weigh nothing. An empty document has rows of 0.
            last_token = tl.maximum(length, 1) - 1
            token = tl.minimum(first + column, last_token)
            if live_tokens is not None:
                token = tl.load(live_tokens + start + token, mask=length > 0, other=0)
            d_rows = d_values + start * DIM + token[:, None].to(tl.int64) * DIM
            here = tl.cast(tl.minimum(slot, last_slot), tl.int64) * num_rows + q_row
            log_sum, constant, slope = _coefficients(log_sums, constants, slopes, here, q_live)
            if DIM <= BLOCK_K:
                rows = tl.load(d_rows + k[None, :], mask=(k[None, :] < DIM) & (length > 0), other=0.0)
                similarity = product(q_tile, tl.trans(rows), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), PRECISION)
            else:
                similarity = inner_products(
                    q_tile, q_pointers, q_live, d_rows + k[None, :], DIM, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K
                )
                rows = tl.load(d_rows + out[None, :], mask=(out[None, :] < DIM) & (length > 0), other=0.0)
            weight = _weights(
                similarity, log_sum[:, None], constant[:, None], slope[:, None], scale, slopes is not None
            )
            if first + BLOCK_N > length:
                weight = tl.where((first + column < length)[None, :], weight, 0.0)
            total = _add_product(total, weight, rows, PRECISION)
            is_last = first + BLOCK_N >= length
            first = tl.where(is_last, 0, first + BLOCK_N)
            slot = tl.where(is_last, slot + 1, slot)
            start = tl.where(is_last, next_start, start)
            length = tl.where(is_last, next_length, length)
            next_start, next_length = span_of_slot(slot + 1, last_slot, d_starts, d_lengths, candidates)
        row = part.to(tl.int64) * num_rows + q_row
        tl.store(grad_parts + row[:, None] * DIM + out[None, :], total, mask=q_live[:, None] & (out[None, :] < DIM))


@triton.jit
def _add_rows_of_queries(
    total,
    d_tile,
    d_pointers,
    in_document,
    q_values,
    row,
    listed,
    log_sum,
    constant,
    slope,
    scale,
    out,
    HAS_SLOPE: tl.constexpr,
    DIM: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """total + the weights of BLOCK_R query rows on BLOCK_T tokens @ these rows. Rows not listed have coefficients of 0."""
    k = tl.arange(0, BLOCK_K)
    q_rows = q_values + row[:, None] * DIM
    if DIM <= BLOCK_K:
        rows = tl.load(q_rows + k[None, :], mask=listed[:, None] & (k[None, :] < DIM), other=0.0)
        similarity = product(d_tile, tl.trans(rows), tl.zeros([BLOCK_T, BLOCK_R], tl.float32), PRECISION)
    else:
        similarity = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
        for first_k in range(0, DIM, BLOCK_K):
            in_dim = first_k + k[None, :] < DIM
            d_chunk = tl.load(d_pointers + first_k, mask=in_document[:, None] & in_dim, other=0.0)
            q_chunk = tl.load(q_rows + first_k + k[None, :], mask=listed[:, None] & in_dim, other=0.0)
            similarity = product(d_chunk, tl.trans(q_chunk), similarity, PRECISION)
        rows = tl.load(q_rows + out[None, :], mask=listed[:, None] & (out[None, :] < DIM), other=0.0)
    weight = _weights(similarity, log_sum[None, :], constant[None, :], slope[None, :], scale, HAS_SLOPE)
    return _add_product(total, weight, rows, PRECISION)


@kernel("num_slots", "num_queries", "num_rows", "tiles_per_document")
def smooth_document_gradient_kernel(
    q_values,
    q_rows,
    q_offsets,
    q_starts,
    q_lengths,
    q_keep,
    d_values,
    d_starts,
    d_lengths,
    live_tokens,
    pairs,
    pair_offsets,
    log_sums,
    constants,
    slopes,
    grad_d,
    num_slots,
    num_queries,
    num_rows,
    tiles_per_document,
    scale,
    DIM: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Gradient of BLOCK_T live tokens of one document, of BLOCK_D numbers of a vector, from all rows that scored it.

    Those are all rows, or those that `q_rows` lists, as many as the last of `q_offsets` says. With candidates they are
    the rows of the queries of pairs[pair_offsets[n] : pair_offsets[n + 1]], flat indices query * num_slots + slot.
    """
    document = (tl.program_id(0) // tiles_per_document).to(tl.int64)
    first = (tl.program_id(0) % tiles_per_document) * BLOCK_T
    length = tl.load(d_lengths + document).to(tl.int32)
    if first < length:
        token = tl.minimum(first + tl.arange(0, BLOCK_T), length - 1)
        in_document = first + tl.arange(0, BLOCK_T) < length
        start = tl.load(d_starts + document)
        if live_tokens is not None:
            token = tl.load(live_tokens + start + token)
        k = tl.arange(0, BLOCK_K)
        d_row = (start + token)[:, None] * DIM
        d_pointers = d_values + d_row + k[None, :]
        d_tile = None
        if DIM <= BLOCK_K:
            d_tile = tl.load(d_pointers, mask=in_document[:, None] & (k[None, :] < DIM), other=0.0)
        out = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
        total = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
        if pairs is None:
            num_live = num_rows
            if q_rows is not None:
                num_live = tl.load(q_offsets + num_queries).to(tl.int32)
            for i in range(0, num_live, BLOCK_R):
                index = i + tl.arange(0, BLOCK_R)
                listed = index < num_live
                row = index
                if q_rows is not None:
                    row = tl.load(q_rows + index, mask=listed, other=0)
                row = row.to(tl.int64)
                here = document * num_rows + row
                log_sum, constant, slope = _coefficients(log_sums, constants, slopes, here, listed)
                total = _add_rows_of_queries(
                    total, d_tile, d_pointers, in_document, q_values, row, listed, log_sum, constant, slope, scale, out,
                    slopes is not None, DIM, PRECISION, BLOCK_T, BLOCK_R, BLOCK_K,
                )  # fmt: skip
        else:
            end = tl.load(pair_offsets + document + 1)
            for i in range(tl.load(pair_offsets + document), end):
                pair = tl.load(pairs + i)
                query = pair // num_slots
                slot = pair % num_slots
                q_start = tl.load(q_starts + query)
                q_length = tl.load(q_lengths + query).to(tl.int32)
                for first_row in range(0, q_length, BLOCK_R):
                    offset = first_row + tl.arange(0, BLOCK_R)
                    row = q_start + offset
                    listed = offset < q_length
                    if q_keep is not None:
                        listed = listed & (tl.load(q_keep + row, mask=listed, other=0) != 0)
                    here = slot * num_rows + row
                    log_sum, constant, slope = _coefficients(log_sums, constants, slopes, here, listed)
                    total = _add_rows_of_queries(
                        total, d_tile, d_pointers, in_document, q_values, row, listed, log_sum, constant, slope, scale,
                        out, slopes is not None, DIM, PRECISION, BLOCK_T, BLOCK_R, BLOCK_K,
                    )  # fmt: skip
        tl.store(grad_d + d_row + out[None, :], total, mask=in_document[:, None] & (out[None, :] < DIM))
