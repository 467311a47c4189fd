"""Attention within each text: one tile that holds a short text, or the tiles that a tile of a longer one sees."""

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
    text_and_head,
    turned,
)
from pylate_fastmaxsim.kernels.runtime.cached_launch import kernel


@kernel("q_head", "k_head", "v_head", "num_rows", "reach")
def attention_kernel(
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
    LONG: tl.constexpr,
):
    """One head of one text that has more than LONGER_THAN rows or keys: a text of up to BLOCK, or BLOCK rows of a LONG one.

    Of a short text all weights are on the chip at once. A LONG one writes `log_sums`, ``[HEADS, num_rows]``: the logarithm
    to base 2 of the divisor of a row's weights. They stay 0 for a short text, whose weights the backward recomputes.
    """
    head, start, length, key_start, key_length = text_and_head(cu_seqlens, key_cu_seqlens, HEADS)
    longest = tl.maximum(length, key_length)
    if LONG:
        if longest > LONGER_THAN:
            q = first_of(q_states, start, head, q_head, Q_ROW)
            k = first_of(k_states, key_start, head, k_head, K_ROW)
            v = first_of(v_states, key_start, head, v_head, V_ROW)
            for first in range(tl.program_id(1) * BLOCK, length, tl.num_programs(1) * BLOCK):
                rows = first + tl.arange(0, BLOCK)
                q_tile = load_rows(q, rows, length, Q_ROW, DIM, COLUMNS)
                best = tl.full([BLOCK], float("-inf"), tl.float32)
                total = tl.zeros([BLOCK], tl.float32)
                states = tl.zeros([BLOCK, COLUMNS], tl.float32)
                low, high = seen(first, key_length, reach, HAS_WINDOW, BLOCK)
                for begin in range(low, high, BLOCK):
                    columns = begin + tl.arange(0, BLOCK)
                    k_tile = load_rows(k, columns, key_length, K_ROW, DIM, COLUMNS)
                    s = logits(q_tile, k_tile, rows, columns, key_length, reach, SCALE, HAS_WINDOW)
                    larger = tl.maximum(best, tl.max(s, axis=1))
                    weights = tl.exp2(s - finite(larger)[:, None])
                    shrink = tl.exp2(best - finite(larger))
                    total = total * shrink + tl.sum(weights, axis=1)
                    v_tile = load_rows(v, columns, key_length, V_ROW, DIM, COLUMNS)
                    keep = kept(seed, head, start + first, begin, BLOCK, DROPOUT)
                    weights = dropped(weights, keep, DROPOUT)
                    states = tl.dot(weights.to(v_tile.dtype), v_tile, states * shrink[:, None])
                    best = larger
                total = tl.where(total == 0.0, 1.0, total)
                store_rows(
                    out + (start * HEADS + head) * DIM, rows, length, states / total[:, None], HEADS * DIM, DIM, COLUMNS
                )
                tl.store(log_sums + head * num_rows + start + rows, finite(best) + tl.log2(total), mask=rows < length)
    elif longest > LONGER_THAN and longest <= BLOCK:
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


@kernel("num_rows")
def rotary_kernel(qkv, cos, sin, num_rows, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Turn the queries and keys of ``qkv [num_rows, 3, HEADS, DIM]``, BLOCK of them in a program.

    Of `cos` and `sin`, ``[num_rows, DIM]``, the first half of the columns is read; the second is equal to it.
    """
    HALF: tl.constexpr = DIM // 2
    vector = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = (vector // (2 * HEADS)).to(tl.int64)
    inside = (row < num_rows)[:, None]
    columns = tl.arange(0, HALF)[None, :]
    # Queries and keys of a row lie side by side.
    place = (row * (3 * HEADS * DIM) + vector % (2 * HEADS) * DIM)[:, None] + columns
    first = tl.load(qkv + place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(qkv + place + HALF, mask=inside, other=0.0).to(tl.float32)
    angle = (row * DIM)[:, None] + columns
    cos_tile = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
    sin_tile = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
    first, second = turned(first, second, cos_tile, sin_tile)
    tl.store(qkv + place, first.to(qkv.dtype.element_ty), mask=inside)
    tl.store(qkv + place + HALF, second.to(qkv.dtype.element_ty), mask=inside)
