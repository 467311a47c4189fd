"""Document gradient of MaxSim, without float atomics: each token sums the query rows it won for, in a fixed order."""

import triton
import triton.language as tl


@triton.jit
def row_query_kernel(q_starts, q_lengths, row_query, BLOCK: tl.constexpr):
    """row_query[row] = the query that row belongs to; rows of no query keep what they hold."""
    query = tl.program_id(0)
    start = tl.load(q_starts + query)
    length = tl.load(q_lengths + query).to(tl.int32)
    for first in range(0, length, BLOCK):
        offset = first + tl.arange(0, BLOCK)
        tl.store(row_query + start + offset, query, mask=offset < length)


@triton.jit
def _add_weighted_rows(total, token, weight, q_rows, BLOCK_T: tl.constexpr, PRECISION: tl.constexpr):
    """total[t] += sum of weight[r] * q_rows[r] over the rows r with token[r] == t, as a matrix product.

    The weights keep at least 16 bits of mantissa: where the operands' format holds fewer, they are
    split into a high and a low part. fp16 goes through TF32, whose exponent also holds tiny weights.
    """
    weights = tl.where(tl.arange(0, BLOCK_T)[:, None] == token[None, :], weight[None, :], 0.0)
    if q_rows.dtype == tl.bfloat16:
        high = weights.to(tl.bfloat16)
        low = (weights - high.to(tl.float32)).to(tl.bfloat16)
        total = tl.dot(high, q_rows, total)
        total = tl.dot(low, q_rows, total)
    elif q_rows.dtype == tl.float16:
        # TF32 drops the last 13 bits of a float32.
        high = (weights.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        q_rows = q_rows.to(tl.float32)
        total = tl.dot(high, q_rows, total, input_precision="tf32")
        total = tl.dot(weights - high, q_rows, total, input_precision="tf32")
    else:
        total = tl.dot(weights, q_rows, total, input_precision=PRECISION)
    return total


@triton.jit
def _in_tile(winner, first, SENTINEL: tl.constexpr, BLOCK_T: tl.constexpr):
    return (winner != SENTINEL) & (winner >= first) & (winner < first + BLOCK_T)


@triton.jit(do_not_specialize=["num_documents", "num_rows", "tiles_per_document"])
def document_gradient_kernel(
    grad_scores,
    winners,
    q_values,
    row_query,
    d_starts,
    d_lengths,
    buckets,
    grad_d,
    num_documents,
    num_rows,
    tiles_per_document,
    DIM: tl.constexpr,
    SENTINEL: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SCAN: tl.constexpr,
):
    """Gradient of BLOCK_T tokens of one document, every query scored against every document.

    First the rows that a token of this tile won are listed, in order, in this tile's own part of
    buckets[document] (behind those of the tiles before it: a counting sort, of which each tile does its
    share). Then a matrix product sums those rows only. Tiles without a winner are not touched:
    `grad_d` comes filled with zeros.
    """
    program = tl.program_id(0)
    document = (program // tiles_per_document).to(tl.int64)
    first = (program % tiles_per_document) * BLOCK_T
    length = tl.load(d_lengths + document)
    if first < length:
        winners += document * num_rows
        bucket = buckets + document * num_rows
        scan = tl.arange(0, BLOCK_SCAN)

        before = tl.zeros([BLOCK_SCAN], tl.int32)
        if first > 0:
            for first_row in range(0, num_rows, BLOCK_SCAN):
                row = first_row + scan
                winner = tl.load(winners + row, mask=row < num_rows, other=SENTINEL).to(tl.int32)
                before += ((winner != SENTINEL) & (winner < first)).to(tl.int32)
        bucket += tl.sum(before, axis=0)
        count = 0
        for first_row in range(0, num_rows, BLOCK_SCAN):
            row = first_row + scan
            winner = tl.load(winners + row, mask=row < num_rows, other=SENTINEL).to(tl.int32)
            here = _in_tile(winner, first, SENTINEL, BLOCK_T)
            rank = tl.cumsum(here.to(tl.int32), axis=0)
            tl.store(bucket + count + rank - 1, row, mask=here)
            count += tl.sum(here.to(tl.int32), axis=0)
        tl.debug_barrier()

        if count > 0:
            token = first + tl.arange(0, BLOCK_T)
            out = grad_d + (tl.load(d_starts + document) + token)[:, None] * DIM
            for first_d in range(0, DIM, BLOCK_D):
                column = first_d + tl.arange(0, BLOCK_D)
                in_dim = column[None, :] < DIM
                total = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
                for i in range(0, count, BLOCK_R):
                    index = i + tl.arange(0, BLOCK_R)
                    listed = index < count
                    row = tl.load(bucket + index, mask=listed, other=0).to(tl.int64)
                    winner = tl.load(winners + row).to(tl.int32)
                    query = tl.load(row_query + row)
                    weight = tl.load(
                        grad_scores + query.to(tl.int64) * num_documents + document, mask=listed, other=0.0
                    )
                    q_rows = tl.load(
                        q_values + row[:, None] * DIM + column[None, :], mask=listed[:, None] & in_dim, other=0.0
                    )
                    total = _add_weighted_rows(total, winner - first, weight, q_rows, BLOCK_T, PRECISION)
                tl.store(out + column[None, :], total, mask=(token < length)[:, None] & in_dim)


@triton.jit(do_not_specialize=["num_slots", "num_rows", "tiles_per_document"])
def candidate_document_gradient_kernel(
    grad_scores,
    winners,
    q_values,
    q_starts,
    q_lengths,
    d_starts,
    d_lengths,
    pairs,
    pair_offsets,
    grad_d,
    num_slots,
    num_rows,
    tiles_per_document,
    DIM: tl.constexpr,
    SENTINEL: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Gradient of BLOCK_T tokens of one document from the pairs (query, slot) that name it as a candidate.

    pairs[pair_offsets[n] : pair_offsets[n + 1]] are the flat indices query * num_slots + slot of document n.
    """
    program = tl.program_id(0)
    document = (program // tiles_per_document).to(tl.int64)
    first = (program % tiles_per_document) * BLOCK_T
    length = tl.load(d_lengths + document)
    first_pair = tl.load(pair_offsets + document)
    last_pair = tl.load(pair_offsets + document + 1)
    if (first < length) & (first_pair < last_pair):
        column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
        in_dim = column[None, :] < DIM
        total = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
        for i in range(first_pair, last_pair):
            pair = tl.load(pairs + i)
            query = pair // num_slots
            start = tl.load(q_starts + query)
            query_length = tl.load(q_lengths + query).to(tl.int32)
            pair_weight = tl.load(grad_scores + pair)
            for first_row in range(0, query_length, BLOCK_R):
                offset = first_row + tl.arange(0, BLOCK_R)
                row = start + offset
                winner = tl.load(
                    winners + (pair % num_slots) * num_rows + row, mask=offset < query_length, other=SENTINEL
                ).to(tl.int32)
                here = _in_tile(winner, first, SENTINEL, BLOCK_T)
                q_rows = tl.load(
                    q_values + row[:, None] * DIM + column[None, :], mask=here[:, None] & in_dim, other=0.0
                )
                weight = tl.where(here, pair_weight, 0.0)
                total = _add_weighted_rows(total, winner - first, weight, q_rows, BLOCK_T, PRECISION)
        token = first + tl.arange(0, BLOCK_T)
        tl.store(
            grad_d + (tl.load(d_starts + document) + token)[:, None] * DIM + column[None, :],
            total,
            mask=(token < length)[:, None] & in_dim,
        )
