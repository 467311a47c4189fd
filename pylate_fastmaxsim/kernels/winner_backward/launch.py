"""Gradients from winners on CUDA: launches the Triton kernels. Never waits for the device."""

import torch
from torch import Tensor

from pylate_fastmaxsim._dtypes import float32_precision
from pylate_fastmaxsim._operands import ScoringOperands
from pylate_fastmaxsim._winners import no_winner
from pylate_fastmaxsim.kernels.runtime.arch import (
    ALL_REGISTERS,
    INPUT_PRECISION,
    architecture,
    arithmetic,
    cdiv,
    launch_options,
    next_power_of_2,
)
from pylate_fastmaxsim.kernels.runtime.tensors import contiguous, gradient_of, on_device_of
from pylate_fastmaxsim.kernels.winner_backward.document_gradient import (
    candidate_document_gradient_kernel,
    document_gradient_kernel,
)
from pylate_fastmaxsim.kernels.winner_backward.query_gradient import query_gradient_kernel
from pylate_fastmaxsim.kernels.winner_backward.sorting import (
    LONGEST_TILE,
    candidate_order_kernel,
    count_kernel,
    place_kernel,
    row_query_kernel,
)
from pylate_fastmaxsim.kernels.winner_backward.tiles import (
    QueryGradientTiles,
    candidate_gradient_tiles,
    document_gradient_tiles,
    query_gradient_tiles,
)

# Places of buckets at once: 32 MiB of entries and weights, 48 MiB where entries are sets, and seldom as much of counts.
BUCKET_ENTRIES = 2**22
# Winners that a program of the counting sort of sets holds.
WINNERS_AT_ONCE = 2**11
# Warps of a launch that fill every multiprocessor of the largest GPU, and that leave most of them idle.
_MANY_WARPS, _FEW_WARPS = 2**12, 2**10
# Up to so many comparisons the quadratic sort of candidates is faster than the launches of a library's sort.
QUADRATIC_ORDER = 2**26
# Up to so many candidates each document's program reads all of them, which is faster than sorting them first.
SCANNED_PAIRS = 2**13
BLOCK_SCAN = 2048


def backward(
    grad_scores: Tensor, winners: Tensor, operands: ScoringOperands, need_q: bool, need_d: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of ``q_values`` and ``d_values``; an empty tensor for one that is not needed.

    Every score is the sum of the products of its query rows with their winners. These are positions of tokens in their
    document, or ``no_winner`` of their dtype: ``[P, Tq]``, or contiguous ``[P, K, Tq]`` with K winners of each row, which
    are K different tokens. Masks and floor play no part: the rows that they exclude have no winner.
    """
    d_values = operands.d_values
    if not need_q:
        # Only the shape of the documents counts then.
        operands = operands._replace(d_values=d_values[:0])
    operands = contiguous(operands)
    q_values = operands.q_values
    sizes = operands.max_q_length, operands.max_d_length, winners.numel(), q_values.shape[1]
    nothing_scored = 0 in (*grad_scores.shape, *sizes)
    grad_q = gradient_of(q_values, need_q, operands.q_gapless and not nothing_scored)
    grad_d = gradient_of(d_values, need_d, operands.d_gapless and not nothing_scored)
    if nothing_scored:
        return grad_q, grad_d
    grad_scores = grad_scores.contiguous()
    with on_device_of(q_values):
        row_query = None
        if need_d and operands.candidates is None:
            # Rows of no query stay unwritten. They have no winner, so nothing reads them.
            row_query = torch.empty(q_values.shape[0], dtype=torch.int32, device=q_values.device)
        if need_q:
            dim, ranks = d_values.shape[1], _ranks(winners)
            kind = arithmetic(d_values.dtype, float32_precision(d_values.dtype))
            tile = query_gradient_tiles(architecture(d_values.device), kind, dim)
            row_blocks = cdiv(operands.max_q_length, tile.block_rows)
            grid = (operands.q_starts.shape[0] * row_blocks, cdiv(dim, tile.block_d))
            query_gradient_kernel[grid](
                grad_scores, winners, operands.q_starts, operands.q_lengths,
                operands.d_values, operands.d_starts, operands.candidates, grad_q, row_query,
                grad_scores.shape[1], winners.shape[-1], row_blocks, DIM=dim, SENTINEL=no_winner(winners.dtype),
                **in_flight(tile, ranks, grid[0] * grid[1] * tile.num_warps), **launch_options(tile),
                maxnreg=None if ranks == 1 else ALL_REGISTERS,
            )  # fmt: skip
        elif row_query is not None:
            grid = (operands.q_starts.shape[0],)
            row_query_kernel[grid](operands.q_starts, operands.q_lengths, row_query, BLOCK=128, num_warps=1)
        if need_d and operands.candidates is None:
            document_gradient(grad_scores, winners, row_query, operands, grad_d)
        elif need_d:
            _candidate_document_gradient(grad_scores, winners, operands, grad_d)
    return grad_q, grad_d


def _ranks(winners: Tensor) -> int:
    return 1 if winners.dim() == 2 else winners.shape[1]


def in_flight(tile: QueryGradientTiles, ranks: int, warps: int) -> dict[str, int]:
    """Constants of the query gradient: of how many slots and ranks it loads winners and vectors at a time."""
    unroll = tile.unroll
    if ranks > 1:
        # Either many warps or many loads of each hide the time that a load takes.
        unroll = unroll // 2 if warps >= _MANY_WARPS else 2 * unroll if warps <= _FEW_WARPS else unroll
    return {
        "RANKS": ranks,
        "RANKS_AT_ONCE": cdiv(ranks, cdiv(ranks, unroll)),
        "UNROLL": max(1, unroll // ranks),
    }


def document_gradient(
    grad_scores: Tensor, winners: Tensor, row_query: Tensor, operands: ScoringOperands, grad_d: Tensor
) -> None:
    q_values, d_starts, d_lengths = operands.q_values, operands.d_starts, operands.d_lengths
    num_rows, dim = q_values.shape
    precision = float32_precision(q_values.dtype)
    kind = arithmetic(q_values.dtype, precision)
    tile = document_gradient_tiles(architecture(q_values.device), kind, dim)
    device = q_values.device
    ranks = _ranks(winners)
    if ranks > 1:
        tile = tile._replace(
            block_t=min(tile.block_t, LONGEST_TILE),
            rows_of_scan=min(tile.rows_of_scan, WINNERS_AT_ONCE // next_power_of_2(ranks)),
        )
    num_documents = d_starts.shape[0]
    tiles_per_document = cdiv(operands.max_d_length, tile.block_t)
    num_chunks = cdiv(num_rows, tile.rows_of_scan)
    # A row has one place for each tile that it may have won in.
    num_entries = num_rows * min(ranks, tiles_per_document)
    # Buckets hold an entry and a weight for each place and document, and a count and its prefix sum for each tile and
    # chunk. Taking some documents at a time bounds that.
    at_once = max(1, min(num_documents, BUCKET_ENTRIES // max(num_entries, tiles_per_document * num_chunks)))
    entry_dtype = torch.int32 if ranks == 1 and num_rows * tile.block_t <= 2**31 else torch.int64
    count_dtype = torch.int32 if num_entries < 2**31 else torch.int64
    counts = torch.empty((at_once, 1 + tiles_per_document * num_chunks), dtype=count_dtype, device=device)
    buckets = torch.empty((at_once, num_entries), dtype=entry_dtype, device=device)
    weights = torch.empty((at_once, num_entries), dtype=torch.float32, device=device)
    scan = {"RANKS": ranks, "BLOCK_RANKS": next_power_of_2(ranks), "SENTINEL": no_winner(winners.dtype)}
    scan |= {"BLOCK_T": tile.block_t, "BLOCK_SCAN": tile.rows_of_scan, "num_warps": tile.scan_warps}
    for first_document in range(0, num_documents, at_once):
        here = min(at_once, num_documents - first_document)
        grid = (here * num_chunks,)
        given = grad_scores, winners, row_query, d_lengths
        sizes = first_document, num_documents, num_rows, num_chunks, tiles_per_document
        count_kernel[grid](*given, counts, *sizes, **scan)
        begins = torch.cumsum(counts, dim=1, dtype=count_dtype)
        place_kernel[grid](*given, begins, buckets, weights, *sizes, **scan)
        document_gradient_kernel[(here * tiles_per_document,)](
            q_values, d_starts, d_lengths, buckets, weights, begins, grad_d,
            first_document, num_entries, num_chunks, tiles_per_document, DIM=dim, SETS=ranks > 1,
            WRITE_ZEROS=operands.d_gapless, PRECISION=INPUT_PRECISION[precision], **launch_options(tile),
        )  # fmt: skip


def _candidate_document_gradient(
    grad_scores: Tensor, winners: Tensor, operands: ScoringOperands, grad_d: Tensor
) -> None:
    q_values, candidates = operands.q_values, operands.candidates
    num_rows, dim = q_values.shape
    precision = float32_precision(q_values.dtype)
    kind = arithmetic(q_values.dtype, precision)
    tile = candidate_gradient_tiles(architecture(q_values.device), kind, dim)
    num_documents = operands.d_starts.shape[0]
    num_pairs = candidates.numel()
    ranks = _ranks(winners)
    short_queries = ranks == 1 and operands.max_q_length <= tile.block_r
    # In distillation each document is the candidate of one query: one program does all its tiles, and programs for the
    # other tiles would find nothing to do.
    alone = short_queries and num_pairs <= num_documents
    programs_per_document = 1 if alone else cdiv(operands.max_d_length, tile.block_t)
    pairs = pair_offsets = None
    if not alone or num_pairs > SCANNED_PAIRS:
        pairs, pair_offsets = candidate_order(candidates, num_documents)
    grid = (num_documents * programs_per_document, cdiv(dim, tile.block_d))
    if ranks > 1:
        tile = tile._replace(max_registers=ALL_REGISTERS)
    candidate_document_gradient_kernel[grid](
        grad_scores, winners, q_values, operands.q_starts, operands.q_lengths, operands.d_starts, operands.d_lengths,
        candidates, pairs, pair_offsets, grad_d, num_pairs, candidates.shape[1], num_rows, programs_per_document,
        DIM=dim, RANKS=ranks, SENTINEL=no_winner(winners.dtype), SHORT_QUERIES=short_queries,
        WRITE_ZEROS=operands.d_gapless, PRECISION=INPUT_PRECISION[precision], BLOCK_SCAN=BLOCK_SCAN,
        **launch_options(tile),
    )  # fmt: skip


def candidate_order(candidates: Tensor, num_documents: int) -> tuple[Tensor, Tensor]:
    """Flat indices of `candidates` in the order of documents, and where those of each document begin, ``[Nd + 1]``.

    The order of the pairs of one document never varies, so that their sum repeats bit by bit.
    """
    num_pairs = candidates.numel()
    if num_pairs * (num_pairs + num_documents) > QUADRATIC_ORDER:
        named, pairs = torch.sort(candidates.reshape(-1), stable=True)
        return pairs, torch.searchsorted(named, torch.arange(num_documents + 1, device=named.device))
    pairs = candidates.new_empty(num_pairs)
    pair_offsets = candidates.new_empty(num_documents + 1)
    block = 8
    candidate_order_kernel[(cdiv(num_pairs + num_documents + 1, block),)](
        candidates, pairs, pair_offsets, num_pairs, num_documents, BLOCK=block, BLOCK_SCAN=1024
    )
    return pairs, pair_offsets
