"""Bucketing of winners: for each tile of document tokens, the query rows it won and their weights, by counting sort."""

import triton
import triton.language as tl

# Tiles that one program counts at once: a field of 16 bits for each, in twice 64 bits.
TILES_PER_GROUP = 8


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
def _one_in_field(here, place):
    """1 in the 16-bit field `place` of two int64, four fields in each; 0 where not `here`."""
    one = tl.where(here, 1, 0).to(tl.int64) << (16 * (place & 3))
    return tl.where(place < 4, one, 0), tl.where(place < 4, 0, one)


@triton.jit
def _field(low, high, place):
    return ((tl.where(place < 4, low, high) >> (16 * (place & 3))) & 0xFFFF).to(tl.int32)


@triton.jit(do_not_specialize=["first_document", "num_documents", "num_rows", "num_groups"])
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
    num_groups,
    SENTINEL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_SCAN: tl.constexpr,
):
    """Lists the rows won by a group of 8 tiles of one document, tile after tile and in the order of rows.

    An entry is row * BLOCK_T + token within the tile; its weight is the gradient of its score. Entries of document n
    lie in buckets[n * num_rows :], those of its tile t from tile_ranges[n, t, 0] to tile_ranges[n, t, 1], with n counted
    from first_document. A row of weight 0 is left out.
    """
    program = tl.program_id(0)
    local = (program // num_groups).to(tl.int64)
    document = local + first_document
    first = (program % num_groups) * 8 * BLOCK_T
    length = tl.load(d_lengths + document).to(tl.int32)
    if first < length:
        winners += document * num_rows
        grad_scores += document
        buckets += local * num_rows
        weights += local * num_rows
        scan = tl.arange(0, BLOCK_SCAN)
        tiles = tl.arange(0, 8)

        earlier = tl.zeros([BLOCK_SCAN], tl.int32)
        low = tl.zeros([BLOCK_SCAN], tl.int64)
        high = tl.zeros([BLOCK_SCAN], tl.int64)
        for first_row in range(0, num_rows, BLOCK_SCAN):
            row = first_row + scan
            winner = tl.load(winners + row, mask=row < num_rows, other=SENTINEL).to(tl.int32)
            won = winner != SENTINEL
            earlier += (won & (winner < first)).to(tl.int32)
            here = won & (winner >= first) & (winner < first + 8 * BLOCK_T)
            one_low, one_high = _one_in_field(here, (winner - first) // BLOCK_T)
            low += one_low
            high += one_high
        counts = tl.sum(_field(low[:, None], high[:, None], tiles[None, :]), axis=0)
        begin = tl.sum(earlier, axis=0) + tl.cumsum(counts, axis=0) - counts
        end = begin
        for first_row in range(0, num_rows, BLOCK_SCAN):
            row = first_row + scan
            winner = tl.load(winners + row, mask=row < num_rows, other=SENTINEL).to(tl.int32)
            here = (winner != SENTINEL) & (winner >= first) & (winner < first + 8 * BLOCK_T)
            query = tl.load(row_query + row, mask=here, other=0)
            weight = tl.load(grad_scores + query.to(tl.int64) * num_documents, mask=here, other=0.0)
            here = here & (weight != 0.0)
            token = winner - first
            place = token // BLOCK_T
            one_low, one_high = _one_in_field(here, place)
            rank = _field(tl.cumsum(one_low, axis=0), tl.cumsum(one_high, axis=0), place) - 1
            entry = tl.sum(tl.where(place[:, None] == tiles[None, :], end[None, :], 0), axis=1) + rank
            tl.store(buckets + entry, row.to(buckets.dtype.element_ty) * BLOCK_T + token % BLOCK_T, mask=here)
            tl.store(weights + entry, weight, mask=here)
            end += _field(tl.sum(one_low, axis=0), tl.sum(one_high, axis=0), tiles)
        ranges = tile_ranges + (program.to(tl.int64) * 8 + tiles) * 2
        tl.store(ranges, begin)
        tl.store(ranges + 1, end)
