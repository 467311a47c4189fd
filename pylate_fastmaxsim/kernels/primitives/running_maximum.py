"""The running maximum of each query row over the tokens of a document, and where it was first reached."""

import triton
import triton.language as tl

# The group until a column exceeds the floor: the largest that 32 bits can hold.
_NO_GROUP = tl.constexpr(2**31 - 8)


@triton.jit
def maximum_or_nan(a, b):
    # Of integers sm_90 takes the maximum of three in one instruction, which the assembler finds by itself.
    if a.dtype == tl.int32:
        return tl.maximum(a, b)
    # One instruction (max.NaN) from sm_80 on. A plain maximum would hide the NaN of a diverged run.
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def same_bits(a, b):
    """Equality in which a NaN equals itself."""
    return a.to(tl.int32, bitcast=True) == b.to(tl.int32, bitcast=True)


@triton.jit
def _eight_more_unless_same(total, a, b):
    """total + 8 where the bits of a and b differ.

    Integer instructions without a predicate. Written otherwise, it compiles to comparisons and selections, which wait for
    each other's predicates.
    """
    return tl.inline_asm_elementwise(
        "{ .reg .u32 step; sub.u32 step, $2, $3; min.u32 step, step, 1; mad.lo.u32 $0, step, 8, $1; }",
        "=r,r,r,r",
        [total, a, b],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def halves(x, BLOCK_M: tl.constexpr, COUNT: tl.constexpr):
    """The two halves of COUNT groups ``[BLOCK_M, COUNT, 8]``. Nothing moves between threads."""
    return tl.split(tl.permute(tl.reshape(x, [BLOCK_M, 2, COUNT // 2, 8]), [0, 2, 3, 1]))


@triton.jit
def _maxima_of_four(best, x, BLOCK_M: tl.constexpr):
    """The maximum after each of four groups."""
    low, high = halves(x, BLOCK_M, 4)
    x0, x1 = tl.split(tl.permute(low, [0, 2, 1]))
    x2, x3 = tl.split(tl.permute(high, [0, 2, 1]))
    m0 = maximum_or_nan(best, x0)
    m1 = maximum_or_nan(m0, x1)
    m2 = maximum_or_nan(m1, x2)
    m3 = maximum_or_nan(m2, x3)
    return m0, m1, m2, m3


@triton.jit
def _steps_of_four(total, last, before, m0, m1, m2):
    total = _eight_more_unless_same(total, last, before)
    total = _eight_more_unless_same(total, last, m0)
    total = _eight_more_unless_same(total, last, m1)
    return _eight_more_unless_same(total, last, m2)


@triton.jit
def _over_four(best, group, first, x, WANT_WINNERS: tl.constexpr, BLOCK_M: tl.constexpr):
    m0, m1, m2, m3 = _maxima_of_four(best, x, BLOCK_M)
    if WANT_WINNERS:
        reached = _steps_of_four(tl.zeros([BLOCK_M, 8], tl.int32) + (first - 8), m3, best, m0, m1, m2)
        group = tl.where(reached >= first, reached, group)
    return m3, group


@triton.jit
def _over_eight(best, group, first, x, WANT_WINNERS: tl.constexpr, BLOCK_M: tl.constexpr):
    low, high = halves(x, BLOCK_M, 8)
    m0, m1, m2, m3 = _maxima_of_four(best, low, BLOCK_M)
    m4, m5, m6, m7 = _maxima_of_four(m3, high, BLOCK_M)
    if WANT_WINNERS:
        reached = _steps_of_four(tl.zeros([BLOCK_M, 8], tl.int32) + (first - 8), m7, best, m0, m1, m2)
        reached = _steps_of_four(reached, m7, m3, m4, m5, m6)
        group = tl.where(reached >= first, reached, group)
    return m7, group


@triton.jit
def running_maximum(
    best,
    group,
    first,
    similarity,
    WANT_WINNERS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """`best` and `group` ``[BLOCK_M, 8]`` after the columns from `first` on, ``[BLOCK_M, BLOCK_N]``.

    Columns that are equal modulo 8 have one maximum: `best` is its value, and `group`, with WANT_WINNERS, the first
    column of the group of 8 in which it was first reached. The first of equal maxima wins, and so does the first NaN.

    A maximum only grows. So the group of its last value is the number of groups after which it still had another value,
    which is counted without comparisons that depend on each other.
    """
    if BLOCK_N == 32:
        x = tl.reshape(similarity, [BLOCK_M, 4, 8])
        best, group = _over_four(best, group, first, x, WANT_WINNERS, BLOCK_M)
    elif BLOCK_N == 64:
        x = tl.reshape(similarity, [BLOCK_M, 8, 8])
        best, group = _over_eight(best, group, first, x, WANT_WINNERS, BLOCK_M)
    else:
        tl.static_assert(BLOCK_N == 128)
        low, high = halves(tl.reshape(similarity, [BLOCK_M, 16, 8]), BLOCK_M, 16)
        best, group = _over_eight(best, group, first, low, WANT_WINNERS, BLOCK_M)
        best, group = _over_eight(best, group, first + 64, high, WANT_WINNERS, BLOCK_M)
    return best, group


@triton.jit
def no_maximum(floor, BLOCK_M: tl.constexpr):
    """Maxima and groups before the first column of a document: without a floor even a similarity of -infinity can win."""
    group = tl.where(floor == 0, _NO_GROUP, 0)
    return tl.zeros([BLOCK_M, 8], floor.dtype) + floor, tl.zeros([BLOCK_M, 8], tl.int32) + group


@triton.jit
def best_of_row(
    best,
    group,
    document_length,
    live_tokens,
    WANT_WINNERS: tl.constexpr,
    SENTINEL: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Maximum and first winner of each row, from the best of its columns that are equal modulo 8."""
    row_best = tl.reduce(best, 1, maximum_or_nan)
    winner = tl.full([BLOCK_M], SENTINEL, tl.int32)
    if WANT_WINNERS:
        candidate = tl.where(same_bits(best, row_best[:, None]), group + tl.arange(0, 8)[None, :], 2147483647)
        first = tl.min(candidate, axis=1)
        no_winner = (first >= _NO_GROUP) | (document_length == 0)
        winner = tl.where(no_winner, SENTINEL, tl.minimum(first, document_length - 1))
        if live_tokens is not None:
            winner = tl.load(live_tokens + winner, mask=winner != SENTINEL, other=SENTINEL)
    return row_best, winner
