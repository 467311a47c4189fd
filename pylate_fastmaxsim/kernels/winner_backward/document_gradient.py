"""Document gradient, without float atomics: each token sums the query rows it won for, in a fixed order."""

import triton
import triton.language as tl

from pylate_fastmaxsim.kernels.primitives.matmul import product, split
from pylate_fastmaxsim.kernels.runtime.cached_launch import kernel


@triton.jit
def _add_weighted_rows(total, here, weight, q_rows, PRECISION: tl.constexpr):
    """total[t] += sum of weight[r] * q_rows[r] over the rows r with here[t, r], as a matrix product.

    Weights keep at least 16 bits of mantissa: they are split into two bf16 parts, and so are fp16 rows, which are exact
    in two.
    """
    if q_rows.dtype == tl.float32:
        total = product(tl.where(here, weight[None, :], 0.0), q_rows, total, PRECISION)
    else:
        high = weight.to(tl.bfloat16)
        low = (weight - high.to(tl.float32)).to(tl.bfloat16)
        high = tl.where(here, high[None, :], 0.0)
        low = tl.where(here, low[None, :], 0.0)
        if q_rows.dtype == tl.float16:
            q_rows, q_rest = split(q_rows.to(tl.float32))
            total = tl.dot(high, q_rest.to(tl.bfloat16), total)
        total = tl.dot(low, q_rows, total)
        total = tl.dot(high, q_rows, total)
    return total


@kernel("first_document", "num_entries", "num_chunks", "tiles_per_document")
def document_gradient_kernel(
    q_values,
    d_starts,
    d_lengths,
    buckets,
    weights,
    begins,
    grad_d,
    first_document,
    num_entries,
    num_chunks,
    tiles_per_document,
    DIM: tl.constexpr,
    SETS: tl.constexpr,
    WRITE_ZEROS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Gradient of BLOCK_T tokens of one document from the rows in their bucket, which has num_entries places a document.

    place_kernel puts a row and a token there, place_sets_kernel (SETS) a row and a set of tokens.
    Tiles without a row are written only with WRITE_ZEROS; without it `grad_d` comes filled with zeros.
    """
    program = tl.program_id(0)
    local = (program // tiles_per_document).to(tl.int64)
    document = local + first_document
    tile = program % tiles_per_document
    first = tile * BLOCK_T
    length = tl.load(d_lengths + document)
    if first < length:
        begins += local * (1 + tiles_per_document * num_chunks) + tile * num_chunks
        begin = tl.load(begins)
        end = tl.load(begins + num_chunks)
        if WRITE_ZEROS or begin < end:
            buckets += local * num_entries
            weights += local * num_entries
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
                    row = entry >> 32 if SETS else (entry // BLOCK_T).to(tl.int64)
                    q_rows = tl.load(
                        q_values + row[:, None] * DIM + column[None, :], mask=listed[:, None] & in_dim, other=0.0
                    )
                    if SETS:
                        here = ((entry.to(tl.int32)[None, :] >> tl.arange(0, BLOCK_T)[:, None]) & 1) != 0
                    else:
                        here = tl.arange(0, BLOCK_T)[:, None] == (entry % BLOCK_T)[None, :]
                    total = _add_weighted_rows(total, here, weight, q_rows, PRECISION)
                tl.store(out + column[None, :], total, mask=(token < length)[:, None] & in_dim)


@triton.jit
def _naming(candidates, num_pairs, document, after, BLOCK_SCAN: tl.constexpr):
    """The first pair behind `after` that names a document, and how many pairs do."""
    first = 2147483647
    count = 0
    for begin in range(0, num_pairs, BLOCK_SCAN):
        pair = begin + tl.arange(0, BLOCK_SCAN)
        names = (tl.load(candidates + pair, mask=pair < num_pairs, other=-1) == document) & (pair > after)
        first = tl.minimum(first, tl.min(tl.where(names, pair, 2147483647)))
        count += tl.sum(names.to(tl.int32))
    return first.to(tl.int64), count


@triton.jit
def _won_tokens(
    winners,
    in_query,
    num_rows,
    first_token,
    RANKS: tl.constexpr,
    SENTINEL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Which of BLOCK_T tokens each row won, [token, row]; `winners` points to the first rank of each row."""
    here = tl.zeros([BLOCK_T, BLOCK_R], tl.int1)
    for rank in tl.static_range(RANKS):
        winner = tl.load(winners + tl.cast(rank, tl.int64) * num_rows, mask=in_query, other=SENTINEL).to(tl.int32)
        at = first_token + tl.arange(0, BLOCK_T)[:, None] == winner[None, :]
        here = here | (at & (winner != SENTINEL)[None, :])
    return here


@kernel("num_pairs", "num_slots", "num_rows", "programs_per_document")
def candidate_document_gradient_kernel(
    grad_scores,
    winners,
    q_values,
    q_starts,
    q_lengths,
    d_starts,
    d_lengths,
    candidates,
    pairs,
    pair_offsets,
    grad_d,
    num_pairs,
    num_slots,
    num_rows,
    programs_per_document,
    DIM: tl.constexpr,
    RANKS: tl.constexpr,
    SENTINEL: tl.constexpr,
    SHORT_QUERIES: tl.constexpr,
    WRITE_ZEROS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SCAN: tl.constexpr,
):
    """Gradient of one document from the pairs (query, slot) that name it as a candidate.

    pairs[pair_offsets[n] : pair_offsets[n + 1]] are the flat indices query * num_slots + slot of document n. Where
    `pairs` is None, each program looks for them in `candidates`. Tokens without a gradient are written only with
    WRITE_ZEROS; without it `grad_d` comes filled with zeros.

    A document has a program for each tile of BLOCK_T tokens, or one for all tiles. Where one short query with one winner a
    row names it, as in distillation, its first program writes zeros everywhere and then the sums of the rows that share a token; its other
    programs do nothing.
    """
    program = tl.program_id(0)
    document = (program // programs_per_document).to(tl.int64)
    first = (program % programs_per_document) * BLOCK_T
    length = tl.load(d_lengths + document).to(tl.int32)
    if pairs is None:
        first_pair, num_own = _naming(candidates, num_pairs, document, -1, BLOCK_SCAN)
    else:
        begin = tl.load(pair_offsets + document)
        num_own = (tl.load(pair_offsets + document + 1) - begin).to(tl.int32)
        pairs += begin
        first_pair = tl.load(pairs, mask=num_own > 0, other=0)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_dim = column[None, :] < DIM
    grad_d += tl.load(d_starts + document) * DIM
    if SHORT_QUERIES and num_own == 1:
        if first == 0:
            query = first_pair // num_slots
            offset = tl.arange(0, BLOCK_R)
            row = tl.load(q_starts + query) + offset
            in_query = offset < tl.load(q_lengths + query)
            winner = tl.load(winners + (first_pair % num_slots) * num_rows + row, mask=in_query, other=SENTINEL).to(
                tl.int32
            )
            won = winner != SENTINEL
            weight = tl.where(won, tl.load(grad_scores + first_pair), 0.0)
            q_rows = tl.load(q_values + row[:, None] * DIM + column[None, :], mask=won[:, None] & in_dim, other=0.0)
            if WRITE_ZEROS:
                # While the rows are loaded, and right before the sums, which then overwrite zeros still in the cache.
                # Finding the tokens without a sum takes longer than writing a few twice.
                zeros = tl.zeros([BLOCK_T, BLOCK_D], grad_d.dtype.element_ty)
                for first_token in range(0, length, BLOCK_T):
                    token = first_token + tl.arange(0, BLOCK_T)
                    mask = (token < length)[:, None] & in_dim
                    tl.store(grad_d + token.to(tl.int64)[:, None] * DIM + column[None, :], zeros, mask=mask)
                # Other threads write the sums.
                tl.debug_barrier()
            # A pair of weight 0 adds nothing, not even NaN or infinity. Masking the load instead would delay it.
            won = won & (weight != 0.0)
            q_rows = tl.where(won[:, None], q_rows, 0.0)
            same = (winner[:, None] == winner[None, :]) & won[None, :]
            total = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
            total = _add_weighted_rows(total, same, weight, q_rows, PRECISION)
            earlier = same & (offset[None, :] < offset[:, None])
            is_first = won & (tl.max(earlier.to(tl.int32), axis=1) == 0)
            tl.store(
                grad_d + winner.to(tl.int64)[:, None] * DIM + column[None, :],
                total,
                mask=is_first[:, None] & in_dim,
            )
    elif WRITE_ZEROS or num_own > 0:
        end = tl.where(programs_per_document == 1, length, tl.minimum(first + BLOCK_T, length))
        for first_token in range(first, end, BLOCK_T):
            total = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
            pair = tl.cast(-1, tl.int64)
            for i in range(num_own):
                if pairs is None:
                    # In smaller parts, to leave registers for the sums. Few documents come here.
                    pair, _ = _naming(candidates, num_pairs, document, pair, BLOCK_SCAN // 4)
                else:
                    pair = tl.load(pairs + i)
                query = pair // num_slots
                start = tl.load(q_starts + query)
                pair_weight = tl.load(grad_scores + pair)
                # As above, a pair of weight 0. Checked after the load, it spills registers on some architectures.
                query_length = tl.load(q_lengths + query, mask=pair_weight != 0.0, other=0).to(tl.int32)
                for first_row in range(0, query_length, BLOCK_R):
                    offset = first_row + tl.arange(0, BLOCK_R)
                    row = start + offset
                    if RANKS == 1:
                        winner = tl.load(
                            winners + (pair % num_slots) * num_rows + row, mask=offset < query_length, other=SENTINEL
                        ).to(tl.int32)
                        won = (winner != SENTINEL) & (winner >= first_token) & (winner < first_token + BLOCK_T)
                    else:
                        own = winners + (pair % num_slots) * RANKS * num_rows + row
                        in_query = offset < query_length
                        here = _won_tokens(own, in_query, num_rows, first_token, RANKS, SENTINEL, BLOCK_T, BLOCK_R)
                        won = tl.max(here.to(tl.int32), axis=0) != 0
                    q_rows = tl.load(
                        q_values + row[:, None] * DIM + column[None, :], mask=won[:, None] & in_dim, other=0.0
                    )
                    if RANKS == 1:
                        here = (first_token + tl.arange(0, BLOCK_T)[:, None] == winner[None, :]) & won[None, :]
                    weight = tl.where(won, pair_weight, 0.0)
                    total = _add_weighted_rows(total, here, weight, q_rows, PRECISION)
            token = first_token + tl.arange(0, BLOCK_T)
            mask = (token < length)[:, None] & in_dim
            if not WRITE_ZEROS:
                mask = mask & (total != 0.0)
            tl.store(grad_d + token.to(tl.int64)[:, None] * DIM + column[None, :], total, mask=mask)
