"""MaxSim on CUDA: launches the Triton kernels. Never waits for the device."""

import torch
from torch import Tensor

from pylate_fastmaxsim._operands import ScoringOperands
from pylate_fastmaxsim._winners import no_winner, winner_dtype
from pylate_fastmaxsim.kernels.maxsim.forward import forward_kernel
from pylate_fastmaxsim.kernels.maxsim.plan import forward_plan
from pylate_fastmaxsim.kernels.maxsim.tiles import ForwardTiles
from pylate_fastmaxsim.kernels.primitives.live_rows import live_tokens_of
from pylate_fastmaxsim.kernels.runtime.arch import architecture
from pylate_fastmaxsim.kernels.runtime.tensors import as_bytes, contiguous, on_device_of


def forward(
    operands: ScoringOperands,
    want_winners: bool,
    precision: str,
    tiles: ForwardTiles | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Scores ``[Nq, P]`` (float32) and winners ``[P, Tq]``, which are ``None`` unless wanted."""
    operands = contiguous(operands)
    q_values, d_lengths, candidates = operands.q_values, operands.d_lengths, operands.candidates
    num_queries, num_slots = operands.q_starts.shape[0], operands.num_slots
    num_rows, dim = q_values.shape
    index_dtype = winner_dtype(operands.max_d_length)
    nothing_to_score = 0 in (
        num_queries, num_slots, operands.max_q_length, operands.max_d_length, operands.d_values.shape[0], dim
    )  # fmt: skip
    winners = None
    if want_winners:
        winners = q_values.new_empty((num_slots, num_rows), dtype=index_dtype)
        # Rows of no query and dead rows are not written by the kernel.
        if nothing_to_score or not operands.q_gapless or operands.q_keep is not None:
            winners.fill_(no_winner(index_dtype))
    if nothing_to_score:
        return torch.zeros((num_queries, num_slots), dtype=torch.float32, device=q_values.device), winners

    plan = forward_plan(
        architecture(q_values.device), q_values.dtype, precision, dim, num_queries, operands.max_q_length, num_slots,
        candidates is not None, want_winners, index_dtype, tiles,
    )  # fmt: skip
    # Of a query that is cut into blocks, what each of them adds to its scores.
    size = (num_queries, num_slots) if plan.row_blocks == 1 else (plan.row_blocks, num_queries, num_slots)
    scores = q_values.new_empty(size, dtype=torch.float32)
    with on_device_of(q_values):
        live_tokens = None
        if operands.d_keep is not None:
            live_tokens, d_lengths = live_tokens_of(operands.d_starts, d_lengths, operands.d_keep)
        forward_kernel[(plan.programs,)](
            q_values,
            operands.q_starts,
            operands.q_lengths,
            as_bytes(operands.q_keep),
            operands.d_values,
            operands.d_starts,
            d_lengths,
            live_tokens,
            candidates,
            as_bytes(operands.zero_floor),
            scores,
            winners,
            num_queries,
            num_slots,
            plan.num_tiles,
            num_rows,
            plan.row_blocks,
            plan.documents_per_program,
            **plan.constants,
        )
    return (scores if plan.row_blocks == 1 else scores.sum(dim=0)), winners
