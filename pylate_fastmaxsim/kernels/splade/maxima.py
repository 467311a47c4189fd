"""The largest product of each vocabulary row with the tokens of each text, and the token that gave it.

Tokens stand in slots: each text begins at a multiple of 8, so that 8 slots are of one text.
"""

import triton.language as tl

from pylate_fastmaxsim.kernels.primitives.matmul import product
from pylate_fastmaxsim.kernels.primitives.similarities import key_value, order_key
from pylate_fastmaxsim.kernels.runtime.cached_launch import kernel

# The key of a text without a token, where values need not be positive.
NO_KEY = tl.constexpr(-(2**63))
# The key of -infinity as `order_key` gives it. Without its last bits it would be that of a NaN.
KEY_OF_MINUS_INFINITY = tl.constexpr(-0x7F800001)


@kernel("num_rows", "row_blocks", "num_tiles")
def maxima_kernel(
    hidden,
    weight,
    bias,
    slot_rows,
    group_texts,
    counts,
    keys,
    num_rows,
    row_blocks,
    num_tiles,
    DIM: tl.constexpr,
    RECTIFIED: tl.constexpr,
    PRECISION: tl.constexpr,
    GROUP: tl.constexpr,
    TILES_TOGETHER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """keys[text, row] = the largest value in the upper 32 bits, and the first slot that has it in the lower ones.

    A tile of BLOCK_M vocabulary rows and BLOCK_N slots of any texts. The maximum of GROUP slots is that of integers in the
    order of floats whose last three bits are the place of a slot, so that values are rounded down to 21 bits. Tiles
    exchange maxima by atomic operations, whose order does not matter. With RECTIFIED keys come filled with zeros, and
    only positive values and NaN are exchanged; without it they come filled with the smallest integer.
    """
    # Tiles of slots that run together share vocabulary rows in L2.
    program = tl.program_id(0)
    together = TILES_TOGETHER * row_blocks
    first_tile = program // together * TILES_TOGETHER
    width = tl.minimum(num_tiles - first_tile, TILES_TOGETHER)
    tile = first_tile + program % together % width
    row = (program % together // width) * BLOCK_M + tl.arange(0, BLOCK_M)
    slot = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    num_slots = tl.load(counts)
    if tile * BLOCK_N < num_slots:
        k = tl.arange(0, BLOCK_K)
        in_rows = row < num_rows
        token = tl.load(slot_rows + slot, mask=slot < num_slots, other=0)
        # Rows past the end repeat the last one, so that no load of the loop has a mask for them.
        w_pointers = weight + tl.minimum(row, num_rows - 1).to(tl.int64)[:, None] * DIM + k[None, :]
        h_pointers = hidden + token.to(tl.int64)[:, None] * DIM + k[None, :]
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if bias is not None:
            total += tl.load(bias + row, mask=in_rows, other=0.0)[:, None]
        for first_k in range(0, DIM, BLOCK_K):
            if DIM % BLOCK_K == 0:
                w_tile = tl.load(w_pointers + first_k)
                h_tile = tl.load(h_pointers + first_k)
            else:
                in_dim = first_k + k[None, :] < DIM
                w_tile = tl.load(w_pointers + first_k, mask=in_dim, other=0.0)
                h_tile = tl.load(h_pointers + first_k, mask=in_dim, other=0.0)
            total = product(w_tile, tl.trans(h_tile), total, PRECISION)

        place = (GROUP - 1) - tl.arange(0, BLOCK_N) % GROUP
        if RECTIFIED:
            positive = tl.maximum(total, 0.0, propagate_nan=tl.PropagateNan.ALL)
            # Without the sign, which a NaN may have.
            key = (positive.to(tl.int32, bitcast=True) & (0x80000000 - GROUP)) | place[None, :]
        else:
            key = (order_key(total) & -GROUP) | place[None, :]
        best = tl.max(tl.reshape(key, [BLOCK_M, BLOCK_N // GROUP, GROUP]), axis=2)
        group = tile * (BLOCK_N // GROUP) + tl.arange(0, BLOCK_N // GROUP)
        in_slots = group * GROUP < num_slots
        text = tl.load(group_texts + group, mask=in_slots, other=0).to(tl.int64)
        winner = group[None, :] * GROUP + (GROUP - 1) - (best & (GROUP - 1))
        packed = ((best & -GROUP).to(tl.int64) << 32) | (0x7FFFFFFF - winner).to(tl.int64)
        wanted = in_rows[:, None] & in_slots[None, :]
        if RECTIFIED:
            wanted = wanted & (best >= GROUP)
        tl.atomic_max(keys + text[None, :] * num_rows + row[:, None], packed, mask=wanted, sem="relaxed")


@kernel("num_rows", "row_blocks")
def values_kernel(
    keys,
    slot_rows,
    starts,
    values,
    winners,
    num_rows,
    row_blocks,
    RECTIFIED: tl.constexpr,
    LOGS: tl.constexpr,
    SENTINEL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """values[text, row] = log(1 + maximum), LOGS times, and winners[text, row] = the token that gave it, from keys."""
    program = tl.program_id(0)
    text = (program // row_blocks).to(tl.int64)
    row = (program % row_blocks) * BLOCK + tl.arange(0, BLOCK)
    in_rows = row < num_rows
    key = tl.load(keys + text * num_rows + row, mask=in_rows, other=0)
    bits = (key >> 32).to(tl.int32)
    if RECTIFIED:
        has_winner = bits > 0
        value = bits.to(tl.float32, bitcast=True)
    else:
        has_winner = key != NO_KEY
        value = tl.where(has_winner, key_value(tl.maximum(bits, KEY_OF_MINUS_INFINITY)), 0.0)
    for _ in tl.static_range(LOGS):
        # log(1 + x), also of small x: the rounding of 1 + x is made good.
        sum_ = 1.0 + value
        rounded = (sum_ - 1.0) - value
        value = tl.where(value < 1e30, tl.log(sum_) - rounded / sum_, tl.log(value))
    tl.store(values + text * num_rows + row, value, mask=in_rows)
    if winners is not None:
        has_winner = has_winner & in_rows
        slot = 0x7FFFFFFF - (key & 0xFFFFFFFF).to(tl.int32)
        token = tl.load(slot_rows + slot, mask=has_winner, other=0).to(tl.int64) - tl.load(starts + text)
        tl.store(winners + text * num_rows + row, tl.where(has_winner, token, SENTINEL).to(tl.int32), mask=in_rows)


@kernel("num_texts")
def slots_kernel(
    starts,
    lengths,
    live_tokens,
    slot_rows,
    group_texts,
    counts,
    num_texts,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """slot_rows[slot] = row of a token, group_texts[slot // GROUP] = its text, counts[0] = slots of all texts.

    The last token of a text is repeated up to a multiple of GROUP. With `live_tokens`, which lists the live tokens of each
    text at its start, `lengths` counts these.
    """
    text = tl.program_id(0)
    begin = 0
    for first in range(0, text, BLOCK):
        earlier = first + tl.arange(0, BLOCK)
        length = tl.load(lengths + earlier, mask=earlier < text, other=0).to(tl.int32)
        begin += tl.sum(tl.cdiv(length, GROUP) * GROUP, axis=0)
    start = tl.load(starts + text)
    length = tl.load(lengths + text).to(tl.int32)
    end = tl.cdiv(length, GROUP) * GROUP
    for first in range(0, end, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        token = tl.minimum(slot, length - 1)
        if live_tokens is not None:
            token = tl.load(live_tokens + start + token, mask=slot < end, other=0)
        tl.store(slot_rows + begin + slot, (start + token).to(tl.int32), mask=slot < end)
        tl.store(group_texts + (begin + slot) // GROUP, text, mask=(slot < end) & (slot % GROUP == 0))
    if text == num_texts - 1:
        tl.store(counts, begin + end)
