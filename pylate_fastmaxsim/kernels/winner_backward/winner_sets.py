"""Counting sort of winners where each row has several of them: rows by the tile of document tokens that they won in.

As in winner_buckets.py, but an entry is a row and the set of tokens that it won in a tile: its vector is then read once
for all of them.
"""

import triton
import triton.language as tl

from pylate_fastmaxsim.kernels.runtime.cached_launch import Launcher

# A set has a bit for each of 32 tokens, which are one tile or two. Each tile's count is a field of 16 bits.
LONGEST_TILE = 32
_SET = tl.constexpr(LONGEST_TILE)
_NOWHERE = tl.constexpr(2**31 - 1)


@triton.jit
def either(a, b):
    return a | b


@triton.jit
def _winners_of_chunk(
    grad_scores,
    winners,
    row_query,
    row,
    document,
    num_documents,
    num_rows,
    RANKS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    SENTINEL: tl.constexpr,
):
    """Winners [rank, row] of some rows for one document, and weights [row]. Where a weight is 0, nothing won."""
    rank = tl.arange(0, BLOCK_RANKS)[:, None]
    mask = (rank < RANKS) & (row < num_rows)[None, :]
    winner = tl.load(winners + (document * RANKS + rank) * num_rows + row[None, :], mask=mask, other=SENTINEL)
    won = winner.to(tl.int32) != SENTINEL
    here = tl.reduce(won.to(tl.int32), 0, either) != 0
    query = tl.load(row_query + row, mask=here, other=0).to(tl.int64)
    weight = tl.load(grad_scores + query * num_documents + document, mask=here, other=0.0)
    return tl.where(won & (weight != 0.0)[None, :], winner.to(tl.int32), _NOWHERE), weight


@triton.jit
def _set_from(numbers, first):
    """Which of the numbers first .. first + 31 are among those of each row, a bit for each."""
    place = numbers - first
    bit = tl.where((place >= 0) & (place < _SET), tl.full([], 1, tl.int32) << (place & (_SET - 1)), 0)
    return tl.reduce(bit, 0, either)


@triton.jit
def _of_tile(tokens, tile: tl.constexpr, BLOCK_T: tl.constexpr):
    """The part of a set that lies in one of its tiles."""
    return tokens if BLOCK_T == _SET else (tokens >> (tile * BLOCK_T)) & ((1 << BLOCK_T) - 1)


@triton.jit
def _one_in_fields(tokens, BLOCK_T: tl.constexpr):
    packed = tl.zeros(tokens.shape, tl.int32)
    for i in tl.static_range(_SET // BLOCK_T):
        packed += (_of_tile(tokens, i, BLOCK_T) != 0).to(tl.int32) << (16 * i)
    return packed


@Launcher
@triton.jit(do_not_specialize=["first_document", "num_documents", "num_rows", "num_chunks", "tiles_per_document"])
def count_sets_kernel(
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
    RANKS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    SENTINEL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_SCAN: tl.constexpr,
):
    """counts[n, 1 + tile * num_chunks + chunk] as in count_kernel; a row counts once in each tile in which it won."""
    program = tl.program_id(0)
    local = (program // num_chunks).to(tl.int64)
    chunk = program % num_chunks
    document = local + first_document
    row = chunk * BLOCK_SCAN + tl.arange(0, BLOCK_SCAN)
    winner, _ = _winners_of_chunk(
        grad_scores, winners, row_query, row, document, num_documents, num_rows, RANKS, BLOCK_RANKS, SENTINEL
    )
    counts += local * (1 + tiles_per_document * num_chunks)
    if chunk == 0:
        tl.store(counts, 0)
    num_tiles = tl.cdiv(tl.load(d_lengths + document).to(tl.int32), BLOCK_T)
    field = tl.arange(0, 2)
    for first_tile in range(0, num_tiles, _SET):
        # Here a set of tiles: which of them hold a token that the row won.
        tiles = _set_from(winner // BLOCK_T, first_tile)
        for i in range(0, tl.minimum(_SET, num_tiles - first_tile), 2):
            two = tiles >> i
            packed = tl.sum((two & 1) | ((two & 2) << 15), axis=0)
            tile = first_tile + i + field
            tl.store(counts + 1 + tile * num_chunks + chunk, (packed >> (16 * field)) & 0xFFFF, mask=tile < num_tiles)


@Launcher
@triton.jit(do_not_specialize=["first_document", "num_documents", "num_rows", "num_chunks", "tiles_per_document"])
def place_sets_kernel(
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
    RANKS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    SENTINEL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_SCAN: tl.constexpr,
):
    """Puts the rows that count_sets_kernel counted into buckets[n, begins[n, tile * num_chunks + chunk] :].

    An entry is row * 2**32 + the set of tokens that the row won in the tile; its weight is the gradient of its score.
    """
    program = tl.program_id(0)
    local = (program // num_chunks).to(tl.int64)
    chunk = program % num_chunks
    document = local + first_document
    row = chunk * BLOCK_SCAN + tl.arange(0, BLOCK_SCAN)
    winner, weight = _winners_of_chunk(
        grad_scores, winners, row_query, row, document, num_documents, num_rows, RANKS, BLOCK_RANKS, SENTINEL
    )
    begins += local * (1 + tiles_per_document * num_chunks) + chunk
    first_place = local * num_rows * tl.minimum(RANKS, tiles_per_document)
    num_tiles = tl.cdiv(tl.load(d_lengths + document).to(tl.int32), BLOCK_T)
    for first_tile in range(0, num_tiles, _SET // BLOCK_T):
        tokens = _set_from(winner, first_tile * BLOCK_T)
        rank = tl.cumsum(_one_in_fields(tokens, BLOCK_T), axis=0)
        for i in tl.static_range(_SET // BLOCK_T):
            tile = first_tile + i
            own = _of_tile(tokens, i, BLOCK_T)
            begin = tl.load(begins + tile * num_chunks, mask=tile < num_tiles, other=0)
            place = first_place + begin + ((rank >> (16 * i)) & 0xFFFF) - 1
            tl.store(buckets + place, (row.to(tl.int64) << 32) | (own.to(tl.int64) & 0xFFFFFFFF), mask=own != 0)
            tl.store(weights + place, weight, mask=own != 0)
