"""Gradients of attention within each text."""

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
    seen,
    store_rows,
    store_turned_back,
    text_and_head,
)
from pylate_fastmaxsim.kernels.runtime.cached_launch import kernel


@triton.jit
def _inner(out, grad_tile, rows, length, ROW: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr):
    """Inner product of each row of `out` with its gradient."""
    return tl.sum(load_rows(out, rows, length, ROW, DIM, COLUMNS).to(tl.float32) * grad_tile.to(tl.float32), axis=1)


@kernel("q_head", "k_head", "v_head", "grad_head", "num_rows", "num_keys", "reach")
def attention_gradient_kernel(
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
    LONG: tl.constexpr,
):
    """All three gradients of such a text and head, laid out as `q_states`, `k_states` and `v_states`.

    Of a short text `out` and `log_sums` are not read. The softmax subtracts the inner product of a row of `out` with its
    gradient. Here that is the sum of the products of weights and their gradients, which are all on the chip.

    Of a LONG text the gradients of BLOCK rows of `q_states`, and then of as many of `k_states` and `v_states`. Each goes
    over the tiles by itself and recomputes their weights, so that no program adds to what another writes.
    """
    head, start, length, key_start, key_length = text_and_head(cu_seqlens, key_cu_seqlens, HEADS)
    longest = tl.maximum(length, key_length)
    if LONG:
        if longest > LONGER_THAN:
            q = first_of(q_states, start, head, q_head, Q_ROW)
            k = first_of(k_states, key_start, head, k_head, K_ROW)
            v = first_of(v_states, key_start, head, v_head, V_ROW)
            grad = first_of(grad, start, head, grad_head, GRAD_ROW)
            out += (start * HEADS + head) * DIM
            log_sums += head * num_rows + start
            for first in range(tl.program_id(1) * BLOCK, tl.maximum(length, key_length), tl.num_programs(1) * BLOCK):
                mine = first + tl.arange(0, BLOCK)
                if first < length:
                    q_tile = load_rows(q, mine, length, Q_ROW, DIM, COLUMNS)
                    grad_tile = load_rows(grad, mine, length, GRAD_ROW, DIM, COLUMNS)
                    log_sum = tl.load(log_sums + mine, mask=mine < length, other=float("inf"))
                    inner = _inner(out, grad_tile, mine, length, HEADS * DIM, DIM, COLUMNS)
                    q_sum = tl.zeros([BLOCK, COLUMNS], tl.float32)
                    low, high = seen(first, key_length, reach, HAS_WINDOW, BLOCK)
                    for begin in range(low, high, BLOCK):
                        columns = begin + tl.arange(0, BLOCK)
                        k_tile = load_rows(k, columns, key_length, K_ROW, DIM, COLUMNS)
                        v_tile = load_rows(v, columns, key_length, V_ROW, DIM, COLUMNS)
                        s = logits(q_tile, k_tile, mine, columns, key_length, reach, SCALE, HAS_WINDOW)
                        weights = tl.exp2(s - log_sum[:, None])
                        keep = kept(seed, head, start + first, begin, BLOCK, DROPOUT)
                        grad_weights = dropped(tl.dot(grad_tile, tl.trans(v_tile)), keep, DROPOUT)
                        grad_s = weights * (grad_weights - inner[:, None]) * SCALE
                        q_sum = tl.dot(grad_s.to(k_tile.dtype), k_tile, q_sum)
                    grad_q_rows = first_of(grad_q, start, head, q_head, Q_ROW)
                    store_turned_back(grad_q_rows, cos, sin, start, mine, length, q_sum, Q_ROW, DIM, COLUMNS)
                if first < key_length:
                    k_tile = load_rows(k, mine, key_length, K_ROW, DIM, COLUMNS)
                    v_tile = load_rows(v, mine, key_length, V_ROW, DIM, COLUMNS)
                    k_sum = tl.zeros([BLOCK, COLUMNS], tl.float32)
                    v_sum = tl.zeros([BLOCK, COLUMNS], tl.float32)
                    low, high = seen(first, length, reach, HAS_WINDOW, BLOCK)
                    for begin in range(low, high, BLOCK):
                        rows = begin + tl.arange(0, BLOCK)
                        q_tile = load_rows(q, rows, length, Q_ROW, DIM, COLUMNS)
                        grad_tile = load_rows(grad, rows, length, GRAD_ROW, DIM, COLUMNS)
                        log_sum = tl.load(log_sums + rows, mask=rows < length, other=float("inf"))
                        inner = _inner(out, grad_tile, rows, length, HEADS * DIM, DIM, COLUMNS)
                        s = logits(q_tile, k_tile, rows, mine, key_length, reach, SCALE, HAS_WINDOW)
                        weights = tl.exp2(s - log_sum[:, None])
                        keep = kept(seed, head, start + begin, first, BLOCK, DROPOUT)
                        grad_weights = dropped(tl.dot(grad_tile, tl.trans(v_tile)), keep, DROPOUT)
                        grad_s = weights * (grad_weights - inner[:, None]) * SCALE
                        v_sum = tl.dot(tl.trans(dropped(weights, keep, DROPOUT).to(grad_tile.dtype)), grad_tile, v_sum)
                        k_sum = tl.dot(tl.trans(grad_s.to(q_tile.dtype)), q_tile, k_sum)
                    grad_k_rows = first_of(grad_k, key_start, head, k_head, K_ROW)
                    store_turned_back(grad_k_rows, cos, sin, key_start, mine, key_length, k_sum, K_ROW, DIM, COLUMNS)
                    store_rows(
                        first_of(grad_v, key_start, head, v_head, V_ROW), mine, key_length, v_sum, V_ROW, DIM, COLUMNS
                    )
    elif longest > LONGER_THAN and longest <= BLOCK:
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
