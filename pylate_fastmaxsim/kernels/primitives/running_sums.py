"""Running sums of softmax and log-sum-exp pooling over the tokens of a document, in place of a maximum."""

import triton
import triton.language as tl

# The largest exponent before the first column. Finite, so that its difference to itself is 0.
_NOTHING = tl.constexpr(-1.0e30)


@triton.jit
def no_sums(BLOCK_M: tl.constexpr):
    """Largest exponent, sum of exponentials, and sum of these times the similarities, before the first column."""
    zeros = tl.zeros([BLOCK_M, 8], tl.float32)
    return zeros + _NOTHING, zeros, zeros


@triton.jit
def running_sums(
    top, total, weighted, similarity, scale, LOG_SUM_EXP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The three after more columns ``[BLOCK_M, BLOCK_N]``. Columns that are equal modulo 8 have sums of their own."""
    x = tl.reshape(similarity, [BLOCK_M, BLOCK_N // 8, 8])
    higher = tl.maximum(top, tl.max(x, axis=1) * scale)
    weight = tl.exp2(x * scale - higher[:, None, :])
    shrink = tl.exp2(top - higher)
    total = total * shrink + tl.sum(weight, axis=1)
    if not LOG_SUM_EXP:
        weighted = weighted * shrink + tl.sum(weight * x, axis=1)
    return higher, total, weighted


@triton.jit
def pooled_of_row(top, total, weighted, scale, LOG_SUM_EXP: tl.constexpr):
    """Pooled similarity and log of the sum of exponentials, in base 2, of each row."""
    row_top = tl.max(top, axis=1)
    shrink = tl.exp2(top - row_top[:, None])
    row_total = tl.sum(total * shrink, axis=1)
    log_sum = row_top + tl.log2(row_total)
    value = log_sum / scale if LOG_SUM_EXP else tl.sum(weighted * shrink, axis=1) / row_total
    return value, log_sum
