"""Pooled scores on CUDA: launches the Triton kernels. Never waits for the device."""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from pylate_fastmaxsim._dtypes import float32_precision
from pylate_fastmaxsim._operands import PoolingNumbers, ScoringOperands
from pylate_fastmaxsim.kernels.maxsim.forward import forward_kernel
from pylate_fastmaxsim.kernels.maxsim.plan import VECTORS, ForwardPlan, ForwardSizes, forward_plan, new_winners
from pylate_fastmaxsim.kernels.maxsim.tiles import ForwardTiles, fitted
from pylate_fastmaxsim.kernels.pooled.smooth_gradients import (
    coefficients_kernel,
    smooth_document_gradient_kernel,
    smooth_query_gradient_kernel,
)
from pylate_fastmaxsim.kernels.pooled.top_many_forward import top_many_kernel
from pylate_fastmaxsim.kernels.primitives.live_rows import live_rows_of, live_tokens_of
from pylate_fastmaxsim.kernels.runtime.arch import (
    ALL_REGISTERS,
    INPUT_PRECISION,
    architecture,
    arithmetic,
    cdiv,
    launch_options,
    next_power_of_2,
    shrunk,
    table_row,
)
from pylate_fastmaxsim.kernels.runtime.cached_launch import RELEASE
from pylate_fastmaxsim.kernels.runtime.tensors import as_bytes, contiguous, gradient_of, on_device_of
from pylate_fastmaxsim.kernels.winner_backward import launch as winner_backward

# Up to so many winners of a row are kept in order as they come; more are sorted.
MOST_OF_FEW = 4
# The most winners of a row. Sorting and merging are in Triton from 3.4 on.
LARGEST_K = 64 if RELEASE >= (3, 4) else MOST_OF_FEW
# Programs of the query gradient, which documents are divided among: two rounds for each multiprocessor of the largest GPU.
ENOUGH_PROGRAMS = 264


class QueryGradientTiles(NamedTuple):
    """`block_m` query rows by `block_n` tokens, `block_k` numbers of a vector in a product, `block_d` of the gradient."""

    block_m: int
    block_n: int
    block_k: int
    block_d: int
    num_warps: int
    num_stages: int
    max_registers: int | None = ALL_REGISTERS


class DocumentGradientTiles(NamedTuple):
    """`block_t` tokens of a document by `block_r` query rows, and the vector as above."""

    block_t: int
    block_r: int
    block_k: int
    block_d: int
    num_warps: int
    num_stages: int
    max_registers: int | None = ALL_REGISTERS


_SMOOTH_FORWARD = {
    (90, "half"): [(128, ForwardTiles(64, 64, 128, 8, 4, 3)), (None, ForwardTiles(128, 64, 64, 4, 8, 3))],
    (100, "half"): [(128, ForwardTiles(128, 64, 128, 1, 4, 3)), (None, ForwardTiles(128, 64, 64, 1, 8, 3))],
    (80, "half"): [(128, ForwardTiles(128, 64, 128, 1, 8, 2)), (None, ForwardTiles(128, 64, 32, 1, 8, 2))],
    "half": [(128, ForwardTiles(64, 64, 128, 1, 4, 2)), (None, ForwardTiles(32, 32, 32, 1, 4, 3))],
    (90, "bf16x6"): [(128, ForwardTiles(128, 64, 128, 2, 8, 2)), (None, ForwardTiles(128, 64, 32, 1, 8, 3))],
    **dict.fromkeys(("bf16x6", "bf16x3", "tf32"), [(None, ForwardTiles(64, 32, 16, 1, 4, 2))]),
}
_TOP_FEW_FORWARD = _SMOOTH_FORWARD | {
    (90, "half"): [(128, ForwardTiles(64, 64, 128, 8, 4, 3, 168)), (None, ForwardTiles(128, 64, 64, 4, 8, 3))],
    (100, "half"): [(128, ForwardTiles(128, 64, 128, 1, 8, 3)), (None, ForwardTiles(128, 64, 64, 1, 8, 3))],
}
_TOP_MANY_FORWARD = {
    "half": [(None, ForwardTiles(64, 64, 64, 1, 4, 2))],
    **dict.fromkeys(("bf16x6", "bf16x3", "tf32"), [(None, ForwardTiles(64, 64, 16, 1, 8, 2))]),
}
# Of the gradients fp16 has rows of its own: its weights are the sum of two bf16, and take three products.
_QUERY_GRADIENT = {
    (90, "half"): [
        (128, QueryGradientTiles(64, 64, 128, 128, 4, 2, 168)),
        (None, QueryGradientTiles(128, 64, 64, 128, 8, 3)),
    ],
    **dict.fromkeys(("half", "fp16"), [(None, QueryGradientTiles(64, 32, 64, 64, 4, 2))]),
    **dict.fromkeys(("bf16x6", "bf16x3", "tf32"), [(None, QueryGradientTiles(64, 32, 32, 64, 8, 2))]),
}
_DOCUMENT_GRADIENT = {
    (90, "half"): [
        (128, DocumentGradientTiles(64, 64, 128, 128, 4, 3)),
        (None, DocumentGradientTiles(64, 64, 64, 128, 4, 3)),
    ],
    **dict.fromkeys(("half", "fp16"), [(None, DocumentGradientTiles(64, 32, 64, 64, 4, 2))]),
    **dict.fromkeys(("bf16x6", "bf16x3", "tf32"), [(None, DocumentGradientTiles(64, 32, 32, 64, 8, 2))]),
}


@functools.lru_cache(maxsize=256)
def forward_tiles(arch: int, kind: str, dim: int, rows_in_all: int, k: int) -> ForwardTiles:
    """Tiles of the forward for `rows_in_all` query rows; k = 0: of the smooth poolings."""
    table = _SMOOTH_FORWARD if k == 0 else _TOP_FEW_FORWARD if k <= MOST_OF_FEW else _TOP_MANY_FORWARD
    return fitted(table_row(table, arch, kind, dim), arch, dim, rows_in_all)


@functools.lru_cache(maxsize=256)
def query_gradient_tiles(arch: int, kind: str, dim: int, few_registers: bool) -> QueryGradientTiles:
    """`few_registers`: softmax pooling without masks and candidates. Others would spill with as few as the table has."""
    tiles = _fitted(table_row(_QUERY_GRADIENT, arch, kind, dim), dim)
    return tiles if few_registers else tiles._replace(max_registers=ALL_REGISTERS)


@functools.lru_cache(maxsize=256)
def document_gradient_tiles(arch: int, kind: str, dim: int, of_candidates: bool) -> DocumentGradientTiles:
    tiles = _fitted(table_row(_DOCUMENT_GRADIENT, arch, kind, dim), dim)
    # The rows of one query at a time, of which there are seldom more.
    return tiles._replace(block_r=32) if of_candidates else tiles


def _fitted(tiles, dim: int):
    """A vector that fits into one chunk of a product is loaded once for it and for the gradient."""
    tiles = shrunk(tiles, block_k=dim, block_d=dim)
    return tiles._replace(block_d=tiles.block_k) if dim <= tiles.block_k else tiles


def forward(operands: ScoringOperands, pooling: PoolingNumbers, want_state: bool) -> tuple[Tensor, Tensor | None]:
    """Scores ``[Nq, P]`` (float32) and what the backward needs; see :mod:`pylate_fastmaxsim.ops.pooled`.

    That is winners ``[P, k, Tq]``, or ``[1 or 2, P, Tq]`` float32 of the smooth poolings: the log of the sum of
    exponentials in base 2, and for softmax the pooled similarity.
    """
    operands = contiguous(operands)
    q_values, d_values = operands.q_values, operands.d_values
    sizes, num_rows = ForwardSizes.of(operands), q_values.shape[0]
    nothing = sizes.nothing_to_score(operands, d_values)
    state = winners = log_sums = pooled = None
    if want_state and pooling.k:
        state = winners = new_winners(operands, (sizes.num_slots, pooling.k, num_rows), not nothing)
    elif want_state:
        # Rows of no query and dead rows are not written, and not read.
        shape = (1 if pooling.log_sum_exp else 2, sizes.num_slots, num_rows)
        state = q_values.new_empty(shape, dtype=torch.float32)
        log_sums, pooled = state if len(state) == 2 else (state[0], None)
    if nothing:
        return sizes.zero_scores(operands), state
    index_dtype = None if winners is None else winners.dtype
    arch, precision = architecture(q_values.device), float32_precision(q_values.dtype)
    plan = _plan(arch, q_values.dtype, precision, sizes, pooling.k, pooling.log_sum_exp, index_dtype)
    with on_device_of(q_values):
        queries, documents, numbers, scores = plan.arguments(operands, sizes)
        if pooling.k > MOST_OF_FEW:
            top_many_kernel[(plan.programs,)](
                q_values, *queries, d_values, *documents, scores, winners, *numbers, **plan.constants
            )
        else:
            forward_kernel[(plan.programs,)](
                q_values, None, *queries, d_values, None, None, None, None, *documents, None,
                scores, winners, log_sums, pooled, *numbers, None if pooling.k else _scale(pooling), **plan.constants,
            )  # fmt: skip
        return plan.sum_of_blocks(scores), state


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
) -> ForwardPlan:
    tile = forward_tiles(arch, arithmetic(dtype, precision), sizes.dim, sizes.query_rows, k)
    if k > MOST_OF_FEW:
        return forward_plan(tile, precision, sizes, winners, K=k, KEPT=next_power_of_2(k))
    pooling = "top k" if k else "log-sum-exp" if log_sum_exp else "softmax"
    return forward_plan(tile, precision, sizes, winners, **VECTORS, POOLING=pooling, K=k)


def backward(
    gradient: Tensor, state: Tensor, operands: ScoringOperands, pooling: PoolingNumbers, need_q: bool, need_d: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of ``q_values`` and ``d_values`` (empty if not needed) from those of the scores and the forward's state.

    For top-k the gradient of a score comes divided by the number of its document's winners.
    """
    if pooling.k:
        return winner_backward.backward(gradient, state, operands, need_q, need_d)
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
        live_tokens, d_lengths = live_tokens_of(operands.d_starts, operands.d_lengths, operands.d_keep)
        rows = offsets = None
        if operands.candidates is None and not every_row:
            rows, offsets = live_rows_of(operands.q_starts, operands.q_lengths, operands.q_keep, operands.max_q_length)
        queries = (
            q_values, rows, offsets, operands.q_starts, operands.q_lengths, as_bytes(operands.q_keep)
        )  # fmt: skip
        documents = (d_values, operands.d_starts, d_lengths, live_tokens)
        coefficients = (log_sums, constants, slopes)
        arch, precision = architecture(q_values.device), float32_precision(q_values.dtype)
        kind = "fp16" if q_values.dtype == torch.float16 else arithmetic(q_values.dtype, precision)
        common = {"DIM": dim, "PRECISION": INPUT_PRECISION[precision]}
        if need_q:
            few_registers = slopes is not None and rows is None and live_tokens is None and operands.candidates is None
            tile = query_gradient_tiles(arch, kind, dim, few_registers)
            grad_q = _query_gradient(operands, queries, documents, coefficients, pooling, tile, common)
        if need_d:
            tile = document_gradient_tiles(arch, kind, dim, operands.candidates is not None)
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
    slots_per_part = cdiv(num_slots, min(num_slots, max(1, cdiv(ENOUGH_PROGRAMS, num_tiles * chunks))))
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
