"""Counting sort of winners: the query rows that each tile of document tokens won, and their weights.

Rows are taken in chunks. For each document count_kernel counts the rows of each tile in each chunk. The prefix sums of
these counts are where the rows of a tile and chunk begin. place_kernel puts them there, in the order of rows.
"""

import triton
import triton.language as tl

from pylate_fastmaxsim.kernels.runtime.cached_launch import Launcher

# Tiles that are counted at once: a field of 16 bits for each in 64 bits.
_TILES_AT_ONCE = tl.constexpr(4)


@Launcher
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
def _winners_of_chunk(
    grad_scores,
    winners,
    row_query,
    row,
    document,
    num_documents,
    num_rows,
    SENTINEL: tl.constexpr,
):
    """Winner and weight of some rows for one document, and which rows have a winner and a weight other than 0."""
    winner = tl.load(winners + document * num_rows + row, mask=row < num_rows, other=SENTINEL).to(tl.int32)
    here = winner != SENTINEL
    query = tl.load(row_query + row, mask=here, other=0).to(tl.int64)
    weight = tl.load(grad_scores + query * num_documents + document, mask=here, other=0.0)
    return winner, weight, here & (weight != 0.0)


@triton.jit
def _one_in_field(here, place):
    return tl.where(here & (place >= 0) & (place < 4), tl.full([], 1, tl.int64) << (16 * (place & 3)), 0)


@triton.jit
def _field(packed, place):
    return ((packed >> (16 * (place & 3))) & 0xFFFF).to(tl.int32)


@Launcher
@triton.jit(do_not_specialize=["first_document", "num_documents", "num_rows", "num_chunks", "tiles_per_document"])
def count_kernel(
    grad_scores,
    winners,
    row_query,
    d_lengths,
    counts,
    first_document,
    num_documents,
    num_rows,
    num_chunks,
    tiles_per_document,
    SENTINEL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_SCAN: tl.constexpr,
):
    """counts[n, 1 + tile * num_chunks + chunk] = rows of a chunk that a tile of document n won, of weights not 0.

    n counts from first_document. counts[n, 0] = 0, so that prefix sums are where each begins. Counts of tiles behind the
    end of a document stay unwritten, and nothing reads their sums.
    """
    program = tl.program_id(0)
    local = (program // num_chunks).to(tl.int64)
    chunk = program % num_chunks
    document = local + first_document
    row = chunk * BLOCK_SCAN + tl.arange(0, BLOCK_SCAN)
    winner, _, here = _winners_of_chunk(
        grad_scores, winners, row_query, row, document, num_documents, num_rows, SENTINEL
    )
    counts += local * (1 + tiles_per_document * num_chunks)
    if chunk == 0:
        tl.store(counts, 0)
    num_tiles = tl.cdiv(tl.load(d_lengths + document).to(tl.int32), BLOCK_T)
    for first_tile in range(0, num_tiles, _TILES_AT_ONCE):
        packed = tl.sum(_one_in_field(here, winner // BLOCK_T - first_tile), axis=0)
        tile = tl.arange(0, _TILES_AT_ONCE)
        count = _field(packed, tile)
        tile += first_tile
        tl.store(counts + 1 + tile * num_chunks + chunk, count, mask=tile < num_tiles)


@Launcher
@triton.jit(do_not_specialize=["first_document", "num_documents", "num_rows", "num_chunks", "tiles_per_document"])
def place_kernel(
    grad_scores,
    winners,
    row_query,
    d_lengths,
    begins,
    buckets,
    weights,
    first_document,
    num_documents,
    num_rows,
    num_chunks,
    tiles_per_document,
    SENTINEL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_SCAN: tl.constexpr,
):
    """Puts the rows that count_kernel counted into buckets[n, begins[n, tile * num_chunks + chunk] :].

    An entry is row * BLOCK_T + token within the tile; its weight is the gradient of its score.
    """
    program = tl.program_id(0)
    local = (program // num_chunks).to(tl.int64)
    chunk = program % num_chunks
    document = local + first_document
    row = chunk * BLOCK_SCAN + tl.arange(0, BLOCK_SCAN)
    winner, weight, here = _winners_of_chunk(
        grad_scores, winners, row_query, row, document, num_documents, num_rows, SENTINEL
    )
    tile = winner // BLOCK_T
    begins += local * (1 + tiles_per_document * num_chunks)
    begin = tl.load(begins + tile * num_chunks + chunk, mask=here, other=0)
    rank = tl.zeros([BLOCK_SCAN], tl.int32)
    num_tiles = tl.cdiv(tl.load(d_lengths + document).to(tl.int32), BLOCK_T)
    for first_tile in range(0, num_tiles, _TILES_AT_ONCE):
        place = tile - first_tile
        before = tl.cumsum(_one_in_field(here, place), axis=0)
        rank = tl.where((place >= 0) & (place < 4), _field(before, place) - 1, rank)
    entry = local * num_rows + begin + rank
    tl.store(buckets + entry, row.to(buckets.dtype.element_ty) * BLOCK_T + winner % BLOCK_T, mask=here)
    tl.store(weights + entry, weight, mask=here)
