"""The four largest similarities of each query row over the tokens of a document: each thread keeps those of its own columns."""

import triton
import triton.language as tl

from pylate_fastmaxsim.kernels.primitives.running_maximum import halves

# The group of 8 columns that no token lies in. Groups are float32, which holds such integers exactly.
_NOWHERE = tl.constexpr(16777216.0)


@triton.jit
def no_best(BLOCK_M: tl.constexpr):
    """Four values in descending order and their groups, before the first column."""
    value = tl.full([BLOCK_M, 8], float("-inf"), tl.float32)
    group = tl.full([BLOCK_M, 8], _NOWHERE, tl.float32)
    return value, value, value, value, group, group, group, group, tl.zeros([BLOCK_M, 8], tl.float32)


@triton.jit
def inserted_groups(v0, v1, v2, v3, g0, g1, g2, g3, x, group):
    """Groups of the four best after one more of value `x`, which comes behind those that it equals.

    Where x exceeds v1, g1 becomes the group of x, or g0 where it exceeds v0 as well. Selections would go to the unit that
    also compares and takes maxima. So comparisons give 0 or 1, and sums of products select, in the other unit.
    """
    return tl.inline_asm_elementwise(
        """{ .reg .f32 c<4>, d<4>, step;
        set.gt.f32.f32 c0, $12, $4; set.gt.f32.f32 c1, $12, $5; set.gt.f32.f32 c2, $12, $6; set.gt.f32.f32 c3, $12, $7;
        sub.f32 d0, $13, $8; sub.f32 d1, $13, $9; sub.f32 d2, $13, $10; sub.f32 d3, $13, $11;
        fma.rn.f32 $3, c3, d3, $11; neg.f32 step, d2; fma.rn.f32 $3, c2, step, $3;
        fma.rn.f32 $2, c2, d2, $10; neg.f32 step, d1; fma.rn.f32 $2, c1, step, $2;
        fma.rn.f32 $1, c1, d1, $9; neg.f32 step, d0; fma.rn.f32 $1, c0, step, $1;
        fma.rn.f32 $0, c0, d0, $8; }""",
        "=&f,=&f,=&f,=&f,f,f,f,f,f,f,f,f,f,f",
        [v0, v1, v2, v3, g0, g1, g2, g3, x, group],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _insert(v0, v1, v2, v3, g0, g1, g2, g3, x, group, WANT_WINNERS: tl.constexpr):
    if WANT_WINNERS:
        g0, g1, g2, g3 = inserted_groups(v0, v1, v2, v3, g0, g1, g2, g3, x, group)
    v3 = tl.maximum(v3, tl.minimum(v2, x))
    v2 = tl.maximum(v2, tl.minimum(v1, x))
    v1 = tl.maximum(v1, tl.minimum(v0, x))
    v0 = tl.maximum(v0, x)
    return v0, v1, v2, v3, g0, g1, g2, g3


@triton.jit
def _insert_four(
    v0, v1, v2, v3, g0, g1, g2, g3, not_finite, x, group, WANT_WINNERS: tl.constexpr, BLOCK_M: tl.constexpr
):
    """After four groups of 8 columns ``[BLOCK_M, 4, 8]``. `not_finite` is 0 until there is NaN or infinity, then NaN."""
    low, high = halves(x, BLOCK_M, 4)
    x0, x1 = tl.split(tl.permute(low, [0, 2, 1]))
    x2, x3 = tl.split(tl.permute(high, [0, 2, 1]))
    # No comparison finds NaN.
    not_finite = x3 * 0.0 + (x2 * 0.0 + (x1 * 0.0 + (x0 * 0.0 + not_finite)))
    v0, v1, v2, v3, g0, g1, g2, g3 = _insert(v0, v1, v2, v3, g0, g1, g2, g3, x0, group, WANT_WINNERS)
    v0, v1, v2, v3, g0, g1, g2, g3 = _insert(v0, v1, v2, v3, g0, g1, g2, g3, x1, group + 1.0, WANT_WINNERS)
    v0, v1, v2, v3, g0, g1, g2, g3 = _insert(v0, v1, v2, v3, g0, g1, g2, g3, x2, group + 2.0, WANT_WINNERS)
    v0, v1, v2, v3, g0, g1, g2, g3 = _insert(v0, v1, v2, v3, g0, g1, g2, g3, x3, group + 3.0, WANT_WINNERS)
    return v0, v1, v2, v3, g0, g1, g2, g3, not_finite


@triton.jit
def running_best(
    v0, v1, v2, v3, g0, g1, g2, g3, not_finite, first, similarity,
    WANT_WINNERS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Values, groups and `not_finite` after the columns from `first` on, ``[BLOCK_M, BLOCK_N]``."""
    group = (first // 8).to(tl.float32)
    if BLOCK_N == 32:
        v0, v1, v2, v3, g0, g1, g2, g3, not_finite = _insert_four(
            v0, v1, v2, v3, g0, g1, g2, g3, not_finite, tl.reshape(similarity, [BLOCK_M, 4, 8]), group,
            WANT_WINNERS, BLOCK_M,
        )  # fmt: skip
    else:
        tl.static_assert(BLOCK_N == 64)
        low, high = halves(tl.reshape(similarity, [BLOCK_M, 8, 8]), BLOCK_M, 8)
        v0, v1, v2, v3, g0, g1, g2, g3, not_finite = _insert_four(
            v0, v1, v2, v3, g0, g1, g2, g3, not_finite, low, group, WANT_WINNERS, BLOCK_M
        )
        v0, v1, v2, v3, g0, g1, g2, g3, not_finite = _insert_four(
            v0, v1, v2, v3, g0, g1, g2, g3, not_finite, high, group + 4.0, WANT_WINNERS, BLOCK_M
        )
    return v0, v1, v2, v3, g0, g1, g2, g3, not_finite


@triton.jit
def mean_of_best(
    v0, v1, v2, v3, g0, g1, g2, g3, not_finite, length, live_tokens, winners, slot, num_rows, q_row, q_live,
    K: tl.constexpr, WANT_WINNERS: tl.constexpr, SENTINEL: tl.constexpr,
):  # fmt: skip
    """The mean of the K largest of each row; writes their tokens to winners[slot, rank, row]."""
    lane = tl.arange(0, 8)
    total = tl.sum(not_finite, axis=1)
    for rank in tl.static_range(K):
        value = tl.max(v0, axis=1)
        position = tl.where(v0 == value[:, None], g0.to(tl.int32) * 8 + lane[None, :], 2147483647)
        best = tl.min(position, axis=1)
        taken = position == best[:, None]
        total += tl.where(rank < length, value, 0.0)
        if WANT_WINNERS:
            winner = tl.where(best < length, best, SENTINEL)
            if live_tokens is not None:
                winner = tl.load(live_tokens + winner, mask=winner != SENTINEL, other=SENTINEL)
            here = (tl.cast(slot, tl.int64) * K + rank) * num_rows + q_row
            tl.store(winners + here, winner, mask=q_live)
        v0 = tl.where(taken, v1, v0)
        v1 = tl.where(taken, v2, v1)
        v2 = tl.where(taken, v3, v2)
        g0 = tl.where(taken, g1, g0)
        g1 = tl.where(taken, g2, g1)
        g2 = tl.where(taken, g3, g2)
    return total / tl.maximum(tl.minimum(length, K), 1)
