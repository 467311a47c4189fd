"""The tokens of all texts in slots: each text begins at a multiple of 8, so that 8 slots are of one text."""

import triton
import triton.language as tl

from pylate_fastmaxsim.kernels.runtime.cached_launch import Launcher


@Launcher
@triton.jit(do_not_specialize=["num_texts"])
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
