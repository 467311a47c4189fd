"""Parts of the attention kernels: bounds of a text, loads and stores of tiles, rotary positions, logits, dropout."""

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def text_and_head(cu_seqlens, key_cu_seqlens, HEADS: tl.constexpr):
    """The head of a program, and the first row and number of rows of its text; the same of its keys."""
    program = tl.program_id(0)
    text = program // HEADS
    start = tl.load(cu_seqlens + text).to(tl.int64)
    length = (tl.load(cu_seqlens + text + 1) - start).to(tl.int32)
    key_start = tl.load(key_cu_seqlens + text).to(tl.int64)
    key_length = (tl.load(key_cu_seqlens + text + 1) - key_start).to(tl.int32)
    return (program % HEADS).to(tl.int64), start, length, key_start, key_length


@triton.jit
def first_of(values, start, head, head_stride, ROW: tl.constexpr):
    """Pointer to the vector of a row and a head. Strides are multiples of 8, so that 16 bytes are read at a time."""
    return values + start * ROW + head * tl.multiple_of(head_stride, 8)


@triton.jit
def _inside(rows, length, DIM: tl.constexpr, COLUMNS: tl.constexpr):
    """The part of a tile ``[BLOCK, COLUMNS]`` that vectors ``[BLOCK, DIM]`` of a text have."""
    inside = (rows < length)[:, None]
    if DIM < COLUMNS:
        inside = inside & (tl.arange(0, COLUMNS) < DIM)[None, :]
    return inside


@triton.jit
def load_rows(values, rows, length, ROW: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr):
    """Vectors ``[BLOCK, DIM]`` of a text, 0 behind its end and in further columns of ``[BLOCK, COLUMNS]``."""
    places = values + rows[:, None] * ROW + tl.arange(0, COLUMNS)[None, :]
    return tl.load(places, mask=_inside(rows, length, DIM, COLUMNS), other=0.0)


@triton.jit
def store_rows(values, rows, length, tile, ROW: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr):
    places = values + rows[:, None] * ROW + tl.arange(0, COLUMNS)[None, :]
    tl.store(places, tile.to(values.dtype.element_ty), mask=_inside(rows, length, DIM, COLUMNS))


@triton.jit
def is_last(HEADS: tl.constexpr):
    """Say whether this is the program of a head, and of the first rows, of the last text."""
    return (tl.program_id(0) + HEADS >= tl.num_programs(0)) & (tl.program_id(1) == 0)


@triton.jit
def clear_rows(
    values, first, num_rows, ROW: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):
    """Zeros in the rows from `first` to the last of `num_rows`, which belong to no text."""
    for begin in range(first, num_rows, BLOCK):
        rows = begin + tl.arange(0, BLOCK).to(tl.int64)
        store_rows(values, rows, num_rows, tl.zeros([BLOCK, COLUMNS], tl.float32), ROW, DIM, COLUMNS)


@triton.jit
def turned(first, second, cos, sin):
    """Both halves of the columns of vectors at their rotary positions, in float32."""
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def store_turned_back(
    values, cos, sin, start, rows, length, tile, ROW: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr
):
    """Store gradients of turned vectors of the text that begins at `start`, as those of the vectors.

    With `cos` DIM is a power of 2, and COLUMNS the same.
    """
    if cos is None:
        store_rows(values, rows, length, tile, ROW, DIM, COLUMNS)
    else:
        HALF: tl.constexpr = DIM // 2
        place = (start + rows[:, None]) * DIM + tl.arange(0, HALF)[None, :]
        inside = (rows < length)[:, None]
        cos_tile = tl.load(cos + place, mask=inside, other=0.0).to(tl.float32)
        sin_tile = tl.load(sin + place, mask=inside, other=0.0).to(tl.float32)
        first, second = tl.split(tl.permute(tl.reshape(tile, [tile.shape[0], 2, HALF]), (0, 2, 1)))
        first, second = turned(first, second, cos_tile, -sin_tile)
        store_rows(values, rows, length, first, ROW, HALF, HALF)
        store_rows(values + HALF, rows, length, second, ROW, HALF, HALF)


@triton.jit
def logits(q, k, rows, columns, key_length, reach, SCALE: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Inner products of rows with keys, for powers of 2 in place of e; -infinity where a row does not see a key."""
    seen = (columns < key_length)[None, :]
    if HAS_WINDOW:
        seen = seen & (tl.abs(rows[:, None] - columns[None, :]) <= reach)
    return tl.where(seen, tl.dot(q, tl.trans(k)) * (SCALE * _LOG2_E), float("-inf"))


@triton.jit
def seen(first, length, reach, HAS_WINDOW: tl.constexpr, BLOCK: tl.constexpr):
    """Begin and end of the tiles that the BLOCK rows from `first` on see, or that see them."""
    low = 0
    high = length
    if HAS_WINDOW:
        low = tl.maximum(first - reach, 0) // BLOCK * BLOCK
        high = tl.minimum(first + BLOCK + reach, length)
    return low, high


@triton.jit
def kept(seed, head, row, column, BLOCK: tl.constexpr, DROPOUT: tl.constexpr):
    """Say whether dropout keeps each weight of a tile of BLOCK rows by as many keys, by their positions alone.

    `row` is the tile's first row among those of all texts, `column` its first key in the text, a multiple of 4: a call of
    Philox decides on 4 keys.
    """
    if DROPOUT == 0.0:
        keep = True
    else:
        nothing = tl.zeros([BLOCK, BLOCK // 4], tl.int32)
        rows = nothing + (row.to(tl.int32) + tl.arange(0, BLOCK))[:, None]
        fours = nothing + (column // 4 + tl.arange(0, BLOCK // 4))[None, :]
        a, b, c, d = tl.philox(tl.load(seed), rows, fours, nothing + head.to(tl.int32), nothing)
        bits = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [BLOCK, BLOCK])
        keep = (bits >> 8).to(tl.float32) >= DROPOUT * 16777216.0
    return keep


@triton.jit
def dropped(weights, keep, DROPOUT: tl.constexpr):
    """Weights, or gradients of weights, after dropout."""
    if DROPOUT > 0.0:
        weights = tl.where(keep, weights * (1.0 / (1.0 - DROPOUT)), 0.0)
    return weights


@triton.jit
def finite(x):
    """x, or 0 where it is -infinity, so that a row without a visible key gives no NaN."""
    return tl.where(x == float("-inf"), 0.0, x)
