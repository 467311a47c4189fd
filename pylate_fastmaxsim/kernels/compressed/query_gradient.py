"""Query gradient of MaxSim over compressed documents: each query row decompresses the document tokens that won for it."""

import triton.language as tl

from pylate_fastmaxsim.kernels.primitives.stored import from_e4m3, residual_vectors
from pylate_fastmaxsim.kernels.runtime.cached_launch import kernel


@kernel("num_slots", "num_rows", "row_blocks")
def compressed_query_gradient_kernel(
    grad_scores,
    winners,
    q_starts,
    q_lengths,
    stored,
    scales,
    codes,
    centroids,
    byte_words,
    d_starts,
    candidates,
    grad_q,
    num_slots,
    num_rows,
    row_blocks,
    scale,
    FORMAT: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    BITS: tl.constexpr,
    DIM: tl.constexpr,
    SENTINEL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """grad_q[row] = sum over slots of grad_scores[query, slot] * the vector of the winner of (slot, row).

    In the order of slots, so that it repeats bit by bit. FORMAT "fp8" comes as bytes, and its scale as `scale`.
    """
    program = tl.program_id(0)
    query = (program // row_blocks).to(tl.int64)
    offset = (program % row_blocks) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    length = tl.load(q_lengths + query)
    live = offset < length
    if (program % row_blocks) * BLOCK_ROWS < length:
        row = tl.load(q_starts + query) + offset
        k = tl.arange(0, BLOCK_K)
        total = tl.zeros([BLOCK_ROWS, BLOCK_K], tl.float32)
        same = tl.zeros([BLOCK_ROWS], tl.int32)
        for first in range(0, num_slots, UNROLL):
            # Unrolled so that the loads of several slots are in flight together.
            for i in tl.static_range(UNROLL):
                slot = tl.cast(first + i, tl.int64)
                in_slots = slot < num_slots
                weight = tl.load(grad_scores + query * num_slots + slot + same, mask=live & in_slots, other=0.0)
                winner = tl.load(winners + slot * num_rows + row, mask=live & in_slots, other=SENTINEL).to(tl.int32)
                document = slot
                if candidates is not None:
                    document = tl.load(candidates + query * num_slots + slot, mask=in_slots, other=0)
                won = (winner != SENTINEL) & (weight != 0.0)
                # The first token of the batch stands for none.
                token = tl.where(won, tl.load(d_starts + document, mask=in_slots, other=0) + winner, 0)
                if FORMAT == "residual":
                    vector = residual_vectors(
                        token, stored, codes, centroids, byte_words, scales, DIM, BITS, BLOCK_ROWS, BLOCK_K
                    )  # fmt: skip
                    vector = vector.to(grad_q.dtype.element_ty).to(tl.float32)  # as it was scored
                else:
                    numbers = tl.load(
                        stored + token[:, None] * DIM + k[None, :], mask=won[:, None] & (k[None, :] < DIM), other=0
                    )
                    if FORMAT == "int8":
                        vector = numbers.to(tl.float32)
                        if PER_TOKEN:
                            vector *= tl.load(scales + token, mask=won, other=0.0)[:, None]
                        else:
                            weight *= tl.load(scales + document, mask=in_slots, other=0.0)
                    else:
                        vector = from_e4m3(numbers.to(tl.int32))
                        weight *= scale
                total += tl.where(won[:, None], weight[:, None] * vector, 0.0)
        tl.store(grad_q + row[:, None] * DIM + k[None, :], total, mask=live[:, None] & (k[None, :] < DIM))
