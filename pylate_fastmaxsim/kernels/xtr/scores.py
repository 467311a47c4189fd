"""XTR scores from the maxima of query rows and documents and the threshold of each row."""

import triton.language as tl

from pylate_fastmaxsim.kernels.runtime.cached_launch import kernel


@kernel("num_slots", "num_rows", "slot_blocks")
def xtr_scores_kernel(
    maxima,
    thresholds,
    token_winners,
    q_starts,
    q_lengths,
    q_keep,
    d_offsets,
    candidates,
    zero_floor,
    sums,
    divisors,
    winners,
    num_slots,
    num_rows,
    slot_blocks,
    WANT_WINNERS: tl.constexpr,
    SENTINEL: tl.constexpr,
    COUNT_RETRIEVED: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Sum over the rows of a query of the maxima that pass, and their number: all, or only the positive ones.

    winners[slot, row] = token_winners[document, row] where it passes, else none. Both may be the same memory.
    """
    program = tl.program_id(0)
    query = (program // slot_blocks).to(tl.int64)
    slot = (program % slot_blocks) * BLOCK_S + tl.arange(0, BLOCK_S)
    in_slots = slot < num_slots
    document = slot.to(tl.int64)
    if candidates is not None:
        document = tl.load(candidates + query * num_slots + slot, mask=in_slots, other=0)
    begin = tl.load(d_offsets + document, mask=in_slots, other=0)
    end = tl.load(d_offsets + document + 1, mask=in_slots, other=0)
    usable = in_slots & (begin < end)
    floored = tl.zeros([BLOCK_S], tl.int1)
    if zero_floor is not None:
        floored = tl.load(zero_floor + document, mask=in_slots, other=0) != 0
    q_start = tl.load(q_starts + query)
    q_length = tl.load(q_lengths + query).to(tl.int32)
    total = tl.zeros([BLOCK_S], tl.float32)
    count = tl.zeros([BLOCK_S], tl.float32)
    for first in range(0, q_length, BLOCK_R):
        offset = first + tl.arange(0, BLOCK_R)
        row = q_start + offset
        live = offset < q_length
        if q_keep is not None:
            live = live & (tl.load(q_keep + row, mask=live, other=0) != 0)
        threshold = tl.load(thresholds + row, mask=live, other=0.0)[None, :]
        here = usable[:, None] & live[None, :]
        place = document[:, None] * num_rows + row[None, :]
        best = tl.load(maxima + place, mask=here, other=0.0)
        passes = here & ((best >= threshold) | (best != best)) & ((floored[:, None] & (best <= 0.0)) == 0)
        total += tl.sum(tl.where(passes, best, 0.0), axis=1)
        counted = passes
        if not COUNT_RETRIEVED:
            counted = counted & (best > 0.0)
        count += tl.sum(tl.where(counted, 1.0, 0.0), axis=1)
        if WANT_WINNERS:
            winner = tl.load(token_winners + place, mask=passes, other=SENTINEL)
            out = winners + slot.to(tl.int64)[:, None] * num_rows + row[None, :]
            tl.store(out, winner, mask=in_slots[:, None] & live[None, :])
    tl.store(sums + query * num_slots + slot, total, mask=in_slots)
    tl.store(divisors + query * num_slots + slot, count, mask=in_slots)
