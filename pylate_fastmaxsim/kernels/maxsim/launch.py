"""MaxSim on CUDA: launches the Triton kernels. Never waits for the device."""

import functools

import torch
from torch import Tensor

from pylate_fastmaxsim._dtypes import float32_precision
from pylate_fastmaxsim._operands import ScoringOperands
from pylate_fastmaxsim._winners import winner_dtype
from pylate_fastmaxsim.kernels.maxsim.forward import forward_kernel
from pylate_fastmaxsim.kernels.maxsim.plan import VECTORS, ForwardPlan, ForwardSizes, forward_plan, new_winners
from pylate_fastmaxsim.kernels.maxsim.tiles import forward_tiles
from pylate_fastmaxsim.kernels.runtime.arch import architecture, arithmetic, next_power_of_2
from pylate_fastmaxsim.kernels.runtime.tensors import as_bytes, contiguous, on_device_of


def forward(operands: ScoringOperands, want_winners: bool) -> tuple[Tensor, Tensor | None]:
    """Scores ``[Nq, P]`` (float32) and winners ``[P, Tq]``, which are ``None`` unless wanted."""
    operands = contiguous(operands)
    q_values, d_values = operands.q_values, operands.d_values
    sizes = ForwardSizes.of(operands)
    nothing = sizes.nothing_to_score(operands, d_values)
    winners = new_winners(operands, (sizes.num_slots, q_values.shape[0]), not nothing) if want_winners else None
    if nothing:
        return sizes.zero_scores(operands), winners
    index_dtype = winner_dtype(operands.max_d_length) if want_winners else None
    precision = float32_precision(q_values.dtype)
    plan = _plan(architecture(q_values.device), q_values.dtype, precision, sizes, index_dtype)
    with on_device_of(q_values):
        queries, documents, numbers, scores = plan.arguments(operands, sizes)
        forward_kernel[(plan.programs,)](
            q_values, None, *queries, d_values, None, None, None, None, *documents, as_bytes(operands.zero_floor),
            scores, winners, None, None, *numbers, None, **plan.constants,
        )  # fmt: skip
        return plan.sum_of_blocks(scores), winners


@functools.lru_cache(maxsize=1024)
def _plan(
    arch: int,
    dtype: torch.dtype,
    precision: str,
    sizes: ForwardSizes,
    winners: torch.dtype | None,
) -> ForwardPlan:
    kind, longest_query = arithmetic(dtype, precision), next_power_of_2(sizes.max_q_length)
    tile = forward_tiles(
        arch, kind, sizes.dim, sizes.query_rows, winners is not None, longest_query, sizes.short_documents
    )
    return forward_plan(tile, precision, sizes, winners, **VECTORS, POOLING="max", K=1)
