"""Pooled scores on CUDA: launches the Triton kernels. Never waits for the device."""

import functools
import math

import torch
from torch import Tensor

from pylate_fastmaxsim._operands import PoolingNumbers, ScoringOperands
from pylate_fastmaxsim.kernels.maxsim.forward import forward_kernel
from pylate_fastmaxsim.kernels.maxsim.plan import (
    VECTORS,
    ForwardPlan,
    ForwardSizes,
    forward_arguments,
    forward_plan,
    new_winners,
    nothing_to_score,
    sizes_of,
    sum_of_blocks,
    zero_scores,
)
from pylate_fastmaxsim.kernels.maxsim.tiles import ForwardTiles
from pylate_fastmaxsim.kernels.pooled.smooth_gradients import (
    coefficients_kernel,
    smooth_document_gradient_kernel,
    smooth_query_gradient_kernel,
)
from pylate_fastmaxsim.kernels.pooled.tiles import (
    FROM_TABLES,
    MOST_OF_FEW,
    PooledTiles,
    document_gradient_tiles,
    forward_tiles,
    gradient_kind,
    query_gradient_tiles,
)
from pylate_fastmaxsim.kernels.pooled.top_many_forward import top_many_kernel
from pylate_fastmaxsim.kernels.primitives.live_rows import live_rows_of, live_tokens_of
from pylate_fastmaxsim.kernels.runtime.arch import (
    INPUT_PRECISION,
    architecture,
    arithmetic,
    cdiv,
    launch_options,
    next_power_of_2,
)
from pylate_fastmaxsim.kernels.runtime.cached_launch import RELEASE
from pylate_fastmaxsim.kernels.runtime.tensors import as_bytes, contiguous, gradient_of, on_device_of
from pylate_fastmaxsim.kernels.winner_backward import launch as winner_backward

# The most winners of a row. Sorting and merging are in Triton from 3.4 on.
LARGEST_K = 64 if RELEASE >= (3, 4) else MOST_OF_FEW
# Programs of the query gradient, which documents are divided among: two rounds for each multiprocessor of the largest GPU.
_ENOUGH_PROGRAMS = 264


def forward(
    operands: ScoringOperands,
    pooling: PoolingNumbers,
    want_state: bool,
    precision: str,
    tiles: PooledTiles = FROM_TABLES,
) -> tuple[Tensor, Tensor | None]:
    """Scores ``[Nq, P]`` (float32) and what the backward needs; see :mod:`pylate_fastmaxsim.ops.pooled`.

    That is winners ``[P, k, Tq]``, or ``[1 or 2, P, Tq]`` float32 of the smooth poolings: the log of the sum of
    exponentials in base 2, and for softmax the pooled similarity.
    """
    operands = contiguous(operands)
    q_values, d_values = operands.q_values, operands.d_values
    sizes, num_rows = sizes_of(operands), q_values.shape[0]
    nothing = nothing_to_score(operands, d_values, sizes)
    state = winners = log_sums = pooled = None
    if want_state and pooling.k:
        state = winners = new_winners(operands, (sizes.num_slots, pooling.k, num_rows), not nothing)
    elif want_state:
        # Rows of no query and dead rows are not written, and not read.
        shape = (1 if pooling.log_sum_exp else 2, sizes.num_slots, num_rows)
        state = q_values.new_empty(shape, dtype=torch.float32)
        log_sums, pooled = state if len(state) == 2 else (state[0], None)
    if nothing:
        return zero_scores(operands, sizes), state
    index_dtype = None if winners is None else winners.dtype
    plan = _plan(
        architecture(q_values.device), q_values.dtype, precision, sizes, pooling.k, pooling.log_sum_exp, index_dtype,
        tiles.forward,
    )  # fmt: skip
    with on_device_of(q_values):
        queries, documents, numbers, scores = forward_arguments(operands, plan)
        if pooling.k > MOST_OF_FEW:
            top_many_kernel[(plan.programs,)](
                q_values, *queries, d_values, *documents, scores, winners, *numbers, **plan.constants
            )
        else:
            forward_kernel[(plan.programs,)](
                q_values, None, *queries, d_values, None, None, None, None, *documents, None,
                scores, winners, log_sums, pooled, *numbers, None if pooling.k else _scale(pooling), **plan.constants,
            )  # fmt: skip
        return sum_of_blocks(scores, plan), state


def _scale(pooling: PoolingNumbers) -> float:
    """Factor that makes a similarity an exponent of 2."""
    return math.log2(math.e) / pooling.temperature


@functools.lru_cache(maxsize=1024)
def _plan(
    arch: int,
    dtype: torch.dtype,
    precision: str,
    sizes: ForwardSizes,
    k: int,
    log_sum_exp: bool,
    winners: torch.dtype | None,
    tiles: ForwardTiles | None,
) -> ForwardPlan:
    tile = tiles or forward_tiles(arch, arithmetic(dtype, precision), sizes.dim, sizes.query_rows, k)
    if k > MOST_OF_FEW:
        return forward_plan(tile, precision, sizes, winners, K=k, KEPT=next_power_of_2(k))
    pooling = "top k" if k else "log-sum-exp" if log_sum_exp else "softmax"
    return forward_plan(tile, precision, sizes, winners, **VECTORS, POOLING=pooling, K=k)


def backward(
    gradient: Tensor,
    state: Tensor,
    operands: ScoringOperands,
    pooling: PoolingNumbers,
    precision: str,
    need_q: bool,
    need_d: bool,
    tiles: PooledTiles = FROM_TABLES,
) -> tuple[Tensor, Tensor]:
    """Gradients of ``q_values`` and ``d_values`` (empty if not needed) from those of the scores and the forward's state.

    For top-k the gradient of a score comes divided by the number of its document's winners.
    """
    if pooling.k:
        return winner_backward.backward(gradient, state, operands, precision, need_q, need_d)
    operands = contiguous(operands)
    q_values, d_values = operands.q_values, operands.d_values
    num_rows, dim = q_values.shape
    num_queries, num_slots = operands.q_starts.shape[0], operands.num_slots
    nothing_scored = 0 in (*gradient.shape, operands.max_q_length, operands.max_d_length, d_values.shape[0], dim)
    every_row = operands.q_gapless and operands.q_keep is None
    grad_q = gradient_of(q_values, need_q and nothing_scored, False)
    grad_d = gradient_of(d_values, need_d, operands.d_gapless and operands.d_keep is None and not nothing_scored)
    if nothing_scored:
        return grad_q, grad_d
    gradient = gradient.contiguous()
    with on_device_of(q_values):
        log_sums = state[0]
        constants = torch.empty_like(log_sums)
        pooled = slopes = None
        if not pooling.log_sum_exp:
            pooled, slopes = state[1], torch.empty_like(log_sums)
        block_r = min(128, next_power_of_2(operands.max_q_length))
        row_blocks = cdiv(operands.max_q_length, block_r)
        coefficients_kernel[(num_queries * row_blocks, cdiv(num_slots, 16))](
            gradient, pooled, operands.q_starts, operands.q_lengths, constants, slopes,
            num_slots, num_rows, row_blocks, 1.0 / pooling.temperature, BLOCK_S=16, BLOCK_R=block_r, num_warps=4,
        )  # fmt: skip
        live_tokens, d_lengths = None, operands.d_lengths
        if operands.d_keep is not None:
            live_tokens, d_lengths = live_tokens_of(operands.d_starts, d_lengths, operands.d_keep)
        rows = offsets = None
        if operands.candidates is None and not every_row:
            rows, offsets = live_rows_of(operands.q_starts, operands.q_lengths, operands.q_keep, operands.max_q_length)
        queries = (
            q_values, rows, offsets, operands.q_starts, operands.q_lengths, as_bytes(operands.q_keep)
        )  # fmt: skip
        documents = (d_values, operands.d_starts, d_lengths, live_tokens)
        coefficients = (log_sums, constants, slopes)
        kind, arch = gradient_kind(q_values.dtype, precision), architecture(q_values.device)
        common = {"DIM": dim, "PRECISION": INPUT_PRECISION[precision]}
        if need_q:
            few_registers = slopes is not None and rows is None and live_tokens is None and operands.candidates is None
            tile = tiles.query_gradient or query_gradient_tiles(arch, kind, dim, few_registers)
            grad_q = _query_gradient(operands, queries, documents, coefficients, pooling, tile, common)
        if need_d:
            tile = tiles.document_gradient or document_gradient_tiles(arch, kind, dim, operands.candidates is not None)
            pairs = pair_offsets = None
            if operands.candidates is not None:
                pairs, pair_offsets = winner_backward.candidate_order(operands.candidates, operands.d_starts.shape[0])
            tiles_per_document = cdiv(operands.max_d_length, tile.block_t)
            grid = (operands.d_starts.shape[0] * tiles_per_document, cdiv(dim, tile.block_d))
            smooth_document_gradient_kernel[grid](
                *queries, *documents, pairs, pair_offsets, *coefficients, grad_d,
                num_slots, num_queries, num_rows, tiles_per_document, _scale(pooling),
                **common, **launch_options(tile),
            )  # fmt: skip
    return grad_q, grad_d


def _query_gradient(operands, queries, documents, coefficients, pooling, tile, common) -> Tensor:
    """Each part of the documents has a sum of its own. They are added in order."""
    q_values, candidates, num_slots = operands.q_values, operands.candidates, operands.num_slots
    num_rows, dim = q_values.shape
    num_queries = operands.q_starts.shape[0]
    row_blocks = cdiv(operands.max_q_length, tile.block_m)
    num_tiles = cdiv(num_rows, tile.block_m) if candidates is None else num_queries * row_blocks
    chunks = cdiv(dim, tile.block_d)
    slots_per_part = cdiv(num_slots, min(num_slots, max(1, cdiv(_ENOUGH_PROGRAMS, num_tiles * chunks))))
    parts = cdiv(num_slots, slots_per_part)
    # Rows that are not live are not written.
    make = torch.empty if operands.q_gapless and operands.q_keep is None else torch.zeros
    grad_parts = make((parts, num_rows, dim), dtype=torch.float32, device=q_values.device)
    smooth_query_gradient_kernel[(num_tiles * parts, chunks)](
        *queries, *documents, candidates, *coefficients, grad_parts,
        num_slots, num_tiles, num_rows, row_blocks, num_queries, slots_per_part, _scale(pooling),
        **common, **launch_options(tile),
    )  # fmt: skip
    return grad_parts.sum(dim=0).to(q_values.dtype)
