"""What the attention kernels share: where a text begins, loads and stores of tiles, rotary positions, and logits."""

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
def load_rows(values, rows, length, ROW: tl.constexpr, DIM: tl.constexpr):
    """Vectors ``[BLOCK, DIM]`` of a text, 0 behind its end."""
    return tl.load(values + rows[:, None] * ROW + tl.arange(0, DIM)[None, :], mask=(rows < length)[:, None], other=0.0)


@triton.jit
def store_rows(values, rows, length, tile, ROW: tl.constexpr, DIM: tl.constexpr):
    tl.store(
        values + rows[:, None] * ROW + tl.arange(0, DIM)[None, :],
        tile.to(values.dtype.element_ty),
        mask=(rows < length)[:, None],
    )


@triton.jit
def is_last(HEADS: tl.constexpr):
    """Whether this is the program of a head, and of the first rows, of the last text."""
    return (tl.program_id(0) + HEADS >= tl.num_programs(0)) & (tl.program_id(1) == 0)


@triton.jit
def clear_rows(values, first, num_rows, ROW: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Zeros in the rows from `first` to the last of `num_rows`, which belong to no text."""
    for begin in range(first, num_rows, BLOCK):
        rows = begin + tl.arange(0, BLOCK).to(tl.int64)
        store_rows(values, rows, num_rows, tl.zeros([BLOCK, DIM], tl.float32), ROW, DIM)


@triton.jit
def turned(first, second, cos, sin):
    """Both halves of the columns of vectors at their rotary positions, in float32."""
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def store_turned_back(values, cos, sin, start, rows, length, tile, ROW: tl.constexpr, DIM: tl.constexpr):
    """Store gradients ``[BLOCK, DIM]`` of turned vectors of the text that begins at `start`, as those of the vectors."""
    if cos is None:
        store_rows(values, rows, length, tile, ROW, DIM)
    else:
        HALF: tl.constexpr = DIM // 2
        place = (start + rows[:, None]) * DIM + tl.arange(0, HALF)[None, :]
        inside = (rows < length)[:, None]
        cos_tile = tl.load(cos + place, mask=inside, other=0.0).to(tl.float32)
        sin_tile = tl.load(sin + place, mask=inside, other=0.0).to(tl.float32)
        first, second = tl.split(tl.permute(tl.reshape(tile, [tile.shape[0], 2, HALF]), (0, 2, 1)))
        first, second = turned(first, second, cos_tile, -sin_tile)
        store_rows(values, rows, length, first, ROW, HALF)
        store_rows(values + HALF, rows, length, second, ROW, HALF)


@triton.jit
def logits(q, k, rows, columns, key_length, reach, SCALE: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Inner products of rows with keys, for powers of 2 in place of e; -infinity where a row does not see a key."""
    seen = (columns < key_length)[None, :]
    if HAS_WINDOW:
        seen = seen & (tl.abs(rows[:, None] - columns[None, :]) <= reach)
    return tl.where(seen, tl.dot(q, tl.trans(k)) * (SCALE * _LOG2_E), float("-inf"))


@triton.jit
def finite(x):
    """x, or 0 where it is -infinity, so that a row without a visible key gives no NaN."""
    return tl.where(x == float("-inf"), 0.0, x)
