"""Attention of texts that fit one tile: all weights of a text are on the chip at once."""

import triton
import triton.language as tl

from pylate_fastmaxsim.kernels.attention.tiles import (
    clear_rows,
    dropped,
    finite,
    first_of,
    is_last,
    kept,
    load_rows,
    logits,
    store_rows,
    store_turned_back,
    text_and_head,
)
from pylate_fastmaxsim.kernels.runtime.cached_launch import Launcher


@Launcher
@triton.jit(do_not_specialize=["q_head", "k_head", "v_head", "num_rows", "reach"])
def short_attention_kernel(
    q_states,
    k_states,
    v_states,
    out,
    log_sums,
    seed,
    cu_seqlens,
    key_cu_seqlens,
    q_head,
    k_head,
    v_head,
    num_rows,
    reach,
    Q_ROW: tl.constexpr,
    K_ROW: tl.constexpr,
    V_ROW: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    DROPOUT: tl.constexpr,
    LONGER_THAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One head of one text, if its rows and keys are up to BLOCK and either are more than LONGER_THAN.

    `log_sums` stays 0: the backward recomputes the weights of such a text.
    """
    head, start, length, key_start, key_length = text_and_head(cu_seqlens, key_cu_seqlens, HEADS)
    longest = tl.maximum(length, key_length)
    if longest > LONGER_THAN and longest <= BLOCK:
        place = tl.arange(0, BLOCK)
        q = load_rows(first_of(q_states, start, head, q_head, Q_ROW), place, length, Q_ROW, DIM, COLUMNS)
        k = load_rows(first_of(k_states, key_start, head, k_head, K_ROW), place, key_length, K_ROW, DIM, COLUMNS)
        v = load_rows(first_of(v_states, key_start, head, v_head, V_ROW), place, key_length, V_ROW, DIM, COLUMNS)
        s = logits(q, k, place, place, key_length, reach, SCALE, HAS_WINDOW)
        weights = tl.exp2(s - finite(tl.max(s, axis=1))[:, None])
        total = tl.sum(weights, axis=1)
        keep = kept(seed, head, start, 0, BLOCK, DROPOUT)
        states = tl.dot(dropped(weights, keep, DROPOUT).to(v.dtype), v) / tl.where(total == 0.0, 1.0, total)[:, None]
        store_rows(out + (start * HEADS + head) * DIM, place, length, states, HEADS * DIM, DIM, COLUMNS)
    if LONGER_THAN < 0 and is_last(HEADS):
        clear_rows(out + head * DIM, start + length, num_rows, HEADS * DIM, DIM, COLUMNS, BLOCK)


@Launcher
@triton.jit(do_not_specialize=["q_head", "k_head", "v_head", "grad_head", "num_rows", "num_keys", "reach"])
def short_attention_gradient_kernel(
    q_states,
    k_states,
    v_states,
    out,
    grad,
    log_sums,
    seed,
    cos,
    sin,
    cu_seqlens,
    key_cu_seqlens,
    grad_q,
    grad_k,
    grad_v,
    q_head,
    k_head,
    v_head,
    grad_head,
    num_rows,
    num_keys,
    reach,
    Q_ROW: tl.constexpr,
    K_ROW: tl.constexpr,
    V_ROW: tl.constexpr,
    GRAD_ROW: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    DROPOUT: tl.constexpr,
    LONGER_THAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """All three gradients of such a text and head, laid out as `q_states`, `k_states` and `v_states`.

    `out` and `log_sums` are not read. The softmax subtracts the inner product of a row of `out` with its gradient. Here
    that is the sum of the products of weights and their gradients, which are all on the chip.
    """
    head, start, length, key_start, key_length = text_and_head(cu_seqlens, key_cu_seqlens, HEADS)
    longest = tl.maximum(length, key_length)
    if longest > LONGER_THAN and longest <= BLOCK:
        place = tl.arange(0, BLOCK)
        q = load_rows(first_of(q_states, start, head, q_head, Q_ROW), place, length, Q_ROW, DIM, COLUMNS)
        k = load_rows(first_of(k_states, key_start, head, k_head, K_ROW), place, key_length, K_ROW, DIM, COLUMNS)
        v = load_rows(first_of(v_states, key_start, head, v_head, V_ROW), place, key_length, V_ROW, DIM, COLUMNS)
        grad_out = load_rows(first_of(grad, start, head, grad_head, GRAD_ROW), place, length, GRAD_ROW, DIM, COLUMNS)
        s = logits(q, k, place, place, key_length, reach, SCALE, HAS_WINDOW)
        weights = tl.exp2(s - finite(tl.max(s, axis=1))[:, None])
        total = tl.sum(weights, axis=1)
        # Multiplied by the reciprocal: dividing each weight takes far more registers.
        weights *= tl.where(total == 0.0, 0.0, 1.0 / total)[:, None]
        keep = kept(seed, head, start, 0, BLOCK, DROPOUT)
        grad_weights = dropped(tl.dot(grad_out, tl.trans(v)), keep, DROPOUT)
        inner = tl.sum(weights * grad_weights, axis=1)
        # Rows past the end of a text have gradient 0 and add nothing.
        grad_s = (weights * (grad_weights - inner[:, None]) * SCALE).to(q.dtype)
        v_sum = tl.dot(tl.trans(dropped(weights, keep, DROPOUT).to(q.dtype)), grad_out)
        store_rows(first_of(grad_v, key_start, head, v_head, V_ROW), place, key_length, v_sum, V_ROW, DIM, COLUMNS)
        k_sum = tl.dot(tl.trans(grad_s), q)
        grad_k_rows = first_of(grad_k, key_start, head, k_head, K_ROW)
        store_turned_back(grad_k_rows, cos, sin, key_start, place, key_length, k_sum, K_ROW, DIM, COLUMNS)
        q_sum = tl.dot(grad_s, k)
        grad_q_rows = first_of(grad_q, start, head, q_head, Q_ROW)
        store_turned_back(grad_q_rows, cos, sin, start, place, length, q_sum, Q_ROW, DIM, COLUMNS)
    if LONGER_THAN < 0 and is_last(HEADS):
        clear_rows(first_of(grad_q, 0, head, q_head, Q_ROW), start + length, num_rows, Q_ROW, DIM, COLUMNS, BLOCK)
        clear_rows(
            first_of(grad_k, 0, head, k_head, K_ROW), key_start + key_length, num_keys, K_ROW, DIM, COLUMNS, BLOCK
        )
        clear_rows(
            first_of(grad_v, 0, head, v_head, V_ROW), key_start + key_length, num_keys, V_ROW, DIM, COLUMNS, BLOCK
        )
