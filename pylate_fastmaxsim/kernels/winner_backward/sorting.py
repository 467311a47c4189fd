"""Sorts before the document gradient: of winners by the tile of document tokens that they won, of candidates by document.

Winners are sorted by counting. Rows are taken in chunks. For each document count_kernel counts the rows of each tile in each chunk. The prefix sums of
these counts are where the rows of a tile and chunk begin. place_kernel puts them there, in the order of rows.

Where each row has several winners (RANKS), an entry is a row and the set of tokens that it won in a tile: its vector is
then read once for all of them.
"""

import triton
import triton.language as tl

from pylate_fastmaxsim.kernels.runtime.cached_launch import kernel

# Tiles that are counted at once: a field of 16 bits for each in 64 bits.
_TILES_AT_ONCE = tl.constexpr(4)
# A set has a bit for each of 32 tokens, which are one tile or two. Each tile's count is a field of 16 bits.
LONGEST_TILE = 32
_SET = tl.constexpr(LONGEST_TILE)
_NOWHERE = tl.constexpr(2**31 - 1)


@kernel()
def row_query_kernel(q_starts, q_lengths, row_query, BLOCK: tl.constexpr):
    """row_query[row] = the query that row belongs to; rows of no query keep what they hold."""
    query = tl.program_id(0)
    start = tl.load(q_starts + query)
    length = tl.load(q_lengths + query).to(tl.int32)
    for first in range(0, length, BLOCK):
        offset = first + tl.arange(0, BLOCK)
        tl.store(row_query + start + offset, query, mask=offset < length)


@triton.jit
def _winner_of_rows(
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


@triton.jit
def either(a, b):
    return a | b


@triton.jit
def _winners_of_rows(
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


@kernel("first_document", "num_documents", "num_rows", "num_chunks", "tiles_per_document")
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
    RANKS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    SENTINEL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_SCAN: tl.constexpr,
):
    """counts[n, 1 + tile * num_chunks + chunk] = rows of a chunk that a tile of document n won, of weights not 0.

    n counts from first_document. counts[n, 0] = 0, so that prefix sums are where each begins. Counts of tiles behind the
    end of a document stay unwritten, and nothing reads their sums. A row counts once in each tile in which it won.
    """
    program = tl.program_id(0)
    local = (program // num_chunks).to(tl.int64)
    chunk = program % num_chunks
    document = local + first_document
    row = chunk * BLOCK_SCAN + tl.arange(0, BLOCK_SCAN)
    if RANKS == 1:
        winner, weight, here = _winner_of_rows(
            grad_scores, winners, row_query, row, document, num_documents, num_rows, SENTINEL
        )
    else:
        winner, weight = _winners_of_rows(
            grad_scores, winners, row_query, row, document, num_documents, num_rows, RANKS, BLOCK_RANKS, SENTINEL
        )
    counts += local * (1 + tiles_per_document * num_chunks)
    if chunk == 0:
        tl.store(counts, 0)
    num_tiles = tl.cdiv(tl.load(d_lengths + document).to(tl.int32), BLOCK_T)
    if RANKS == 1:
        for first_tile in range(0, num_tiles, _TILES_AT_ONCE):
            packed = tl.sum(_one_in_field(here, winner // BLOCK_T - first_tile), axis=0)
            tile = tl.arange(0, _TILES_AT_ONCE)
            count = _field(packed, tile)
            tile += first_tile
            tl.store(counts + 1 + tile * num_chunks + chunk, count, mask=tile < num_tiles)
    else:
        field = tl.arange(0, 2)
        for first_tile in range(0, num_tiles, _SET):
            # Here a set of tiles: which of them hold a token that the row won.
            tiles = _set_from(winner // BLOCK_T, first_tile)
            for i in range(0, tl.minimum(_SET, num_tiles - first_tile), 2):
                two = tiles >> i
                packed = tl.sum((two & 1) | ((two & 2) << 15), axis=0)
                tile = first_tile + i + field
                count = (packed >> (16 * field)) & 0xFFFF
                tl.store(counts + 1 + tile * num_chunks + chunk, count, mask=tile < num_tiles)


@kernel("first_document", "num_documents", "num_rows", "num_chunks", "tiles_per_document")
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
    RANKS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    SENTINEL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_SCAN: tl.constexpr,
):
    """Puts the rows that count_kernel counted into buckets[n, begins[n, tile * num_chunks + chunk] :].

    An entry is row * BLOCK_T + token within the tile, or row * 2**32 + the set of tokens; its weight is the gradient of its
    score.
    """
    program = tl.program_id(0)
    local = (program // num_chunks).to(tl.int64)
    chunk = program % num_chunks
    document = local + first_document
    row = chunk * BLOCK_SCAN + tl.arange(0, BLOCK_SCAN)
    if RANKS == 1:
        winner, weight, here = _winner_of_rows(
            grad_scores, winners, row_query, row, document, num_documents, num_rows, SENTINEL
        )
    else:
        winner, weight = _winners_of_rows(
            grad_scores, winners, row_query, row, document, num_documents, num_rows, RANKS, BLOCK_RANKS, SENTINEL
        )
    if RANKS == 1:
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
    else:
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


@kernel("num_pairs", "num_documents")
def candidate_order_kernel(
    candidates, pairs, pair_offsets, num_pairs, num_documents, BLOCK: tl.constexpr, BLOCK_SCAN: tl.constexpr
):
    """pairs[pair_offsets[n] : pair_offsets[n + 1]] = flat indices of document n in `candidates`, ascending.

    Every pair counts the pairs that come before it, and every document the pairs of earlier documents: a stable sort of
    quadratic cost, which for short lists is faster than the launches of a linear one.
    """
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_pair = index < num_pairs
    named = tl.load(candidates + index, mask=is_pair, other=0).to(tl.int32)
    document = tl.where(is_pair, named, index - num_pairs)
    ties = tl.where(is_pair, index, 0)
    before = tl.zeros([BLOCK], tl.int32)
    for first in range(0, num_pairs, BLOCK_SCAN):
        other = first + tl.arange(0, BLOCK_SCAN)
        other_named = tl.load(candidates + other, mask=other < num_pairs, other=2147483647).to(tl.int32)
        earlier = other_named[None, :] < document[:, None]
        tied = (other_named[None, :] == document[:, None]) & (other[None, :] < ties[:, None])
        before += tl.sum((earlier | tied).to(tl.int32), axis=1)
    tl.store(pairs + before, index, mask=is_pair)
    tl.store(pair_offsets + index - num_pairs, before, mask=(index >= num_pairs) & (index <= num_pairs + num_documents))
