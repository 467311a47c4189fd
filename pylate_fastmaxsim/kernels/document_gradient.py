"""Document gradient of MaxSim, without float atomics: each token sums the query rows it won for, in a fixed order."""

import triton
import triton.language as tl

from pylate_fastmaxsim.kernels.products import product


@triton.jit
def _add_weighted_rows(total, token, weight, q_rows, BLOCK_T: tl.constexpr, PRECISION: tl.constexpr):
    """total[t] += sum of weight[r] * q_rows[r] over the rows r with token[r] == t, as a matrix product.

    The weights keep 16 bits of mantissa at least: for bf16 rows they are split into a high and a low part; fp16 rows
    are exact in two bf16 parts, whose exponents also hold tiny weights.
    """
    weights = tl.where(tl.arange(0, BLOCK_T)[:, None] == token[None, :], weight[None, :], 0.0)
    if q_rows.dtype == tl.bfloat16:
        high = weights.to(tl.bfloat16)
        low = (weights - high.to(tl.float32)).to(tl.bfloat16)
        total = tl.dot(high, q_rows, total)
        total = tl.dot(low, q_rows, total)
    elif q_rows.dtype == tl.float16:
        total = product(weights, q_rows.to(tl.float32), total, "bf16x3")
    else:
        total = product(weights, q_rows, total, PRECISION)
    return total


@triton.jit(do_not_specialize=["first_document", "num_rows", "tiles_per_document", "num_groups"])
def document_gradient_kernel(
    q_values,
    d_starts,
    d_lengths,
    buckets,
    weights,
    tile_ranges,
    grad_d,
    first_document,
    num_rows,
    tiles_per_document,
    num_groups,
    DIM: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Gradient of BLOCK_T tokens of one document from the rows that bucket_kernel listed for them.

    Tiles without a row are not touched: `grad_d` comes filled with zeros.
    """
    program = tl.program_id(0)
    local = (program // tiles_per_document).to(tl.int64)
    document = local + first_document
    tile = program % tiles_per_document
    first = tile * BLOCK_T
    length = tl.load(d_lengths + document)
    if first < length:
        tile_range = tile_ranges + (local * num_groups * 4 + tile) * 2
        begin = tl.load(tile_range)
        end = tl.load(tile_range + 1)
        if begin < end:
            buckets += local * num_rows
            weights += local * num_rows
            token = first + tl.arange(0, BLOCK_T)
            out = grad_d + (tl.load(d_starts + document) + token)[:, None] * DIM
            for first_d in range(0, DIM, BLOCK_D):
                column = first_d + tl.arange(0, BLOCK_D)
                in_dim = column[None, :] < DIM
                total = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
                for i in range(begin, end, BLOCK_R):
                    index = i + tl.arange(0, BLOCK_R)
                    listed = index < end
                    entry = tl.load(buckets + index, mask=listed, other=0)
                    weight = tl.load(weights + index, mask=listed, other=0.0)
                    row = (entry // BLOCK_T).to(tl.int64)
                    q_rows = tl.load(
                        q_values + row[:, None] * DIM + column[None, :], mask=listed[:, None] & in_dim, other=0.0
                    )
                    total = _add_weighted_rows(total, entry % BLOCK_T, weight, q_rows, BLOCK_T, PRECISION)
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
                here = (winner != SENTINEL) & (winner >= first) & (winner < first + BLOCK_T)
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
