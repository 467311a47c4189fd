"""What the attention kernels share: where a text begins, loads and stores of tiles, and logits."""

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
