"""Pooled scores on CUDA: launches the Triton kernels. Never waits for the device."""

import functools
import math

import torch
from torch import Tensor

from pylate_fastmaxsim._operands import PoolingNumbers, ScoringOperands
from pylate_fastmaxsim._winners import no_winner, winner_dtype
from pylate_fastmaxsim.kernels.maxsim.plan import ForwardPlan, plan_of_tiles, query_rows
from pylate_fastmaxsim.kernels.maxsim.tiles import ForwardTiles
from pylate_fastmaxsim.kernels.pooled.smooth_forward import smooth_forward_kernel
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
from pylate_fastmaxsim.kernels.pooled.top_few_forward import top_few_kernel
from pylate_fastmaxsim.kernels.pooled.top_many_forward import top_many_kernel
from pylate_fastmaxsim.kernels.primitives.live_rows import live_rows_of, live_tokens_of
from pylate_fastmaxsim.kernels.runtime.arch import INPUT_PRECISION, architecture, arithmetic, cdiv, next_power_of_2
from pylate_fastmaxsim.kernels.runtime.tensors import as_bytes, contiguous, on_device_of
from pylate_fastmaxsim.kernels.runtime.triton_version import RELEASE
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
    q_values, d_lengths, candidates = operands.q_values, operands.d_lengths, operands.candidates
    num_queries, num_slots = operands.q_starts.shape[0], operands.num_slots
    num_rows, dim = q_values.shape
    nothing_to_score = 0 in (
        num_queries, num_slots, operands.max_q_length, operands.max_d_length, operands.d_values.shape[0], dim
    )  # fmt: skip
    all_written = not nothing_to_score and operands.q_gapless and operands.q_keep is None
    state = None
    if want_state:
        state = _state(operands, pooling, all_written)
    if nothing_to_score:
        return torch.zeros((num_queries, num_slots), dtype=torch.float32, device=q_values.device), state
    plan = _plan(
        architecture(q_values.device), q_values.dtype, precision, dim, num_queries, operands.max_q_length, num_slots,
        candidates is not None, pooling.k, tiles.forward,
    )  # fmt: skip
    size = (num_queries, num_slots) if plan.row_blocks == 1 else (plan.row_blocks, num_queries, num_slots)
    scores = q_values.new_empty(size, dtype=torch.float32)
    with on_device_of(q_values):
        live_tokens = None
        if operands.d_keep is not None:
            live_tokens, d_lengths = live_tokens_of(operands.d_starts, d_lengths, operands.d_keep)
        inputs = (
            q_values, operands.q_starts, operands.q_lengths, as_bytes(operands.q_keep),
            operands.d_values, operands.d_starts, d_lengths, live_tokens, candidates, scores,
        )  # fmt: skip
        sizes = (num_queries, num_slots, plan.num_tiles, num_rows, plan.row_blocks, plan.documents_per_program)
        k, sentinel = pooling.k, no_winner(winner_dtype(operands.max_d_length))
        if k == 0:
            log_sums = state[0] if want_state else None
            pooled = state[1] if want_state and not pooling.log_sum_exp else None
            smooth_forward_kernel[(plan.programs,)](
                *inputs, log_sums, pooled, *sizes, _scale(pooling), LOG_SUM_EXP=pooling.log_sum_exp, **plan.constants
            )
        elif k <= MOST_OF_FEW:
            top_few_kernel[(plan.programs,)](
                *inputs, state, *sizes, K=k, WANT_WINNERS=want_state, SENTINEL=sentinel, **plan.constants
            )
        else:
            top_many_kernel[(plan.programs,)](
                *inputs, state, *sizes,
                K=k, KEPT=next_power_of_2(k), WANT_WINNERS=want_state, SENTINEL=sentinel, **plan.constants,
            )  # fmt: skip
    return (scores if plan.row_blocks == 1 else scores.sum(dim=0)), state


def _scale(pooling: PoolingNumbers) -> float:
    """What a similarity is multiplied by to be an exponent of 2."""
    return math.log2(math.e) / pooling.temperature


def _state(operands: ScoringOperands, pooling: PoolingNumbers, all_written: bool) -> Tensor:
    q_values = operands.q_values
    if not pooling.k:
        # Rows of no query and dead rows are not written, and not read.
        return q_values.new_empty(
            (1 if pooling.log_sum_exp else 2, operands.num_slots, q_values.shape[0]), dtype=torch.float32
        )
    dtype = winner_dtype(operands.max_d_length)
    winners = q_values.new_empty((operands.num_slots, pooling.k, q_values.shape[0]), dtype=dtype)
    return winners if all_written else winners.fill_(no_winner(dtype))


@functools.lru_cache(maxsize=1024)
def _plan(
    architecture: int,
    dtype: torch.dtype,
    precision: str,
    dim: int,
    num_queries: int,
    max_q_length: int,
    num_slots: int,
    with_candidates: bool,
    k: int,
    tiles: ForwardTiles | None,
) -> ForwardPlan:
    """As MaxSim's plan. ``tiles=None``: those of the tables."""
    rows_in_all = query_rows(num_queries, max_q_length, with_candidates)
    tile = tiles or forward_tiles(architecture, arithmetic(dtype, precision), dim, rows_in_all, k)
    return plan_of_tiles(tile, precision, dim, num_queries, max_q_length, num_slots, with_candidates)


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
    grad_q = winner_backward.gradient_of(q_values, need_q and nothing_scored, False)
    grad_d = winner_backward.gradient_of(
        d_values, need_d, operands.d_gapless and operands.d_keep is None and not nothing_scored
    )
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
                **common, **_options(tile),
            )  # fmt: skip
    return grad_q, grad_d


def _options(tile) -> dict[str, int | None]:
    """Constants of a kernel and options of Triton, from a tile."""
    names = {"num_warps": "num_warps", "num_stages": "num_stages", "max_registers": "maxnreg"}
    return {names.get(name, name.upper()): value for name, value in tile._asdict().items()}


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
        **common, **_options(tile),
    )  # fmt: skip
    return grad_parts.sum(dim=0).to(q_values.dtype)
