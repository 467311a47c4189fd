"""Bucketing of winners: for each tile of document tokens, the query rows it won and their weights, by counting sort."""

import triton
import triton.language as tl

# Tiles that one program counts at once: a field of 16 bits for each in 64 bits.
TILES_PER_GROUP = 4


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
def _field(packed, place):
    return ((packed >> (16 * place)) & 0xFFFF).to(tl.int32)


@triton.jit(do_not_specialize=["first_document", "num_documents", "num_rows", "tiles_per_document", "num_groups"])
def bucket_kernel(
    grad_scores,
    winners,
    row_query,
    d_lengths,
    buckets,
    weights,
    tile_ranges,
    first_document,
    num_documents,
    num_rows,
    tiles_per_document,
    num_groups,
    SENTINEL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_SCAN: tl.constexpr,
):
    """Lists the rows won by TILES_PER_GROUP tiles of one document, tile after tile and in the order of rows.

    An entry is row * BLOCK_T + token within the tile; its weight is the gradient of its score. Entries of document n
    lie in buckets[n * num_rows :], those of its tile t from tile_ranges[n, t, 0] to tile_ranges[n, t, 1], with n counted
    from first_document. A row of weight 0 is left out.
    """
    program = tl.program_id(0)
    local = (program // num_groups).to(tl.int64)
    document = local + first_document
    first = (program % num_groups) * 4 * BLOCK_T
    length = tl.load(d_lengths + document).to(tl.int32)
    if first < length:
        winners += document * num_rows
        grad_scores += document
        buckets += local * num_rows
        weights += local * num_rows
        scan = tl.arange(0, BLOCK_SCAN)

        earlier = tl.zeros([BLOCK_SCAN], tl.int32)
        one_tile = tl.zeros([BLOCK_SCAN], tl.int32)
        two_tiles = tl.zeros([BLOCK_SCAN], tl.int32)
        three_tiles = tl.zeros([BLOCK_SCAN], tl.int32)
        for first_row in range(0, num_rows, BLOCK_SCAN):
            row = first_row + scan
            winner = tl.load(winners + row, mask=row < num_rows, other=SENTINEL).to(tl.int32)
            token = tl.where(winner == SENTINEL, 2147483647, winner)
            earlier += (token < first).to(tl.int32)
            one_tile += (token < first + BLOCK_T).to(tl.int32)
            two_tiles += (token < first + 2 * BLOCK_T).to(tl.int32)
            three_tiles += (token < first + 3 * BLOCK_T).to(tl.int32)
        begin_0 = tl.sum(earlier, axis=0)
        begin_1 = tl.sum(one_tile, axis=0)
        begin_2 = tl.sum(two_tiles, axis=0)
        begin_3 = tl.sum(three_tiles, axis=0)
        end_0 = begin_0
        end_1 = begin_1
        end_2 = begin_2
        end_3 = begin_3
        for first_row in range(0, num_rows, BLOCK_SCAN):
            row = first_row + scan
            winner = tl.load(winners + row, mask=row < num_rows, other=SENTINEL).to(tl.int32)
            here = (winner != SENTINEL) & (winner >= first) & (winner < first + 4 * BLOCK_T)
            query = tl.load(row_query + row, mask=here, other=0)
            weight = tl.load(grad_scores + query.to(tl.int64) * num_documents, mask=here, other=0.0)
            here = here & (weight != 0.0)
            token = winner - first
            place = token // BLOCK_T
            one = tl.where(here, tl.full([BLOCK_SCAN], 1, tl.int64) << (16 * place), 0)
            rank = _field(tl.cumsum(one, axis=0), place) - 1
            end = tl.where(place < 2, tl.where(place == 0, end_0, end_1), tl.where(place == 2, end_2, end_3))
            tl.store(buckets + end + rank, row.to(buckets.dtype.element_ty) * BLOCK_T + token % BLOCK_T, mask=here)
            tl.store(weights + end + rank, weight, mask=here)
            total = tl.sum(one, axis=0)
            end_0 += _field(total, 0)
            end_1 += _field(total, 1)
            end_2 += _field(total, 2)
            end_3 += _field(total, 3)
        # The last group may reach past the last tile: tile_ranges has room for whole groups.
        ranges = tile_ranges + (local * num_groups * 4 + (program % num_groups) * 4) * 2
        tl.store(ranges + 0, begin_0)
        tl.store(ranges + 1, end_0)
        tl.store(ranges + 2, begin_1)
        tl.store(ranges + 3, end_1)
        tl.store(ranges + 4, begin_2)
        tl.store(ranges + 5, end_2)
        tl.store(ranges + 6, begin_3)
        tl.store(ranges + 7, end_3)
