"""XTR scores on CUDA: launches the Triton kernels. Never waits for the device."""

from typing import NamedTuple

import torch
from torch import Tensor

from pylate_fastmaxsim._dtypes import float32_precision
from pylate_fastmaxsim._operands import ScoringOperands
from pylate_fastmaxsim._winners import no_winner, winner_dtype
from pylate_fastmaxsim.kernels.maxsim.tiles import ForwardTiles, documents_per_program, fitted, forward_row
from pylate_fastmaxsim.kernels.primitives.live_rows import LiveRows, live_rows_of
from pylate_fastmaxsim.kernels.runtime.arch import (
    ALL_REGISTERS,
    INPUT_PRECISION,
    architecture,
    arithmetic,
    cdiv,
    launch_options,
    next_power_of_2,
    table_row,
)
from pylate_fastmaxsim.kernels.runtime.tensors import as_bytes, contiguous, on_device_of
from pylate_fastmaxsim.kernels.xtr.kth_largest import bisect_kernel, bound_kernel, collect_kernel, select_kernel
from pylate_fastmaxsim.kernels.xtr.scores import xtr_scores_kernel
from pylate_fastmaxsim.kernels.xtr.token_maxima import negative_maxima_kernel, token_maxima_kernel

# Bounds how many query rows are handled at once, by their groups and collected similarities.
SCRATCH_BYTES = 2**28
# Similarities that can be collected for each row, as a multiple of k, and for all rows together where that is more.
PLACES_OF_K = 8
PLACES = 2**23
# Rounds of collecting; rows that are left are bisected.
ROUNDS = 2
# Programs of a launch of collecting: those of one tile of query rows share the document tokens.
_PROGRAMS = 2048


class CollectTiles(NamedTuple):
    """`block_m` query rows by `block_n` document tokens, with the `block_k` of the maxima."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# Of the maxima where MaxSim's forward tiles have too few registers, and of collecting, which uses the maxima's block_k.
_MAXIMA = {(90, "bf16x6"): [(None, ForwardTiles(128, 64, 32, 1, 8, 3))]}
_COLLECT = {
    (90, "half"): [(128, CollectTiles(64, 32, 4, 3)), (None, CollectTiles(64, 64, 4, 2))],
    "half": [(128, CollectTiles(128, 64, 8, 3)), (None, CollectTiles(64, 64, 4, 2))],
    **dict.fromkeys(
        [(arch, kind) for arch in (90, 100) for kind in ("tf32", "bf16x3", "bf16x6")],
        [(128, CollectTiles(128, 64, 8, 2)), (None, CollectTiles(64, 32, 4, 2))],
    ),
    **dict.fromkeys(("tf32", "bf16x3", "bf16x6"), [(None, CollectTiles(64, 32, 4, 2))]),
}


def maxima_tiles(arch: int, kind: str, dim: int, rows_in_all: int) -> ForwardTiles:
    """Tiles of the maxima for `rows_in_all` query rows."""
    # Never the tiles for few rows: maxima are compared bit by bit with collected similarities, and fewer than 64 rows
    # use other matrix instructions.
    return fitted(table_row(_MAXIMA, arch, kind, dim) or forward_row(arch, kind, dim, True, 1), arch, dim, rows_in_all)


def collect_tiles(arch: int, kind: str, dim: int, rows_in_all: int) -> CollectTiles:
    """Tiles of collecting for `rows_in_all` query rows."""
    tiles = table_row(_COLLECT, arch, kind, dim)
    block_m = max(64, min(tiles.block_m, next_power_of_2(rows_in_all)))
    return tiles._replace(block_m=block_m, num_warps=max(4, tiles.num_warps * block_m // tiles.block_m))


def forward(
    operands: ScoringOperands, k: int, count_retrieved: bool, want_winners: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sums and counts ``[Nq, P]`` (float32) and winners ``[P, Tq]`` (``None`` unless wanted)."""
    operands = contiguous(operands)
    q_values, num_slots = operands.q_values, operands.num_slots
    device = q_values.device
    num_queries, num_documents = len(operands.q_starts), len(operands.d_starts)
    num_rows, dim = q_values.shape
    index_dtype = winner_dtype(operands.max_d_length)
    none, winners = no_winner(index_dtype), None
    if want_winners:
        # The kernels do not write rows of no query, nor masked ones.
        winners = torch.full((num_slots, num_rows), none, dtype=index_dtype, device=device)
    if 0 in (num_queries, num_slots, operands.max_q_length, operands.max_d_length, dim):
        sums = torch.zeros((num_queries, num_slots), dtype=torch.float32, device=device)
        return sums, torch.zeros_like(sums), winners

    token_winners = winners
    if want_winners and operands.candidates is not None:
        token_winners = torch.empty((num_documents, num_rows), dtype=index_dtype, device=device)
    with on_device_of(q_values):
        documents = live_rows_of(operands.d_starts, operands.d_lengths, operands.d_keep, operands.max_d_length)
        thresholds, maxima = _thresholds_and_maxima(
            operands, documents, k, token_winners, zeros_compete=not count_retrieved
        )
        sums = torch.empty((num_queries, num_slots), dtype=torch.float32, device=device)
        counts = torch.empty_like(sums)
        block_s = 16
        slot_blocks = cdiv(num_slots, block_s)
        xtr_scores_kernel[(num_queries * slot_blocks,)](
            maxima, thresholds, token_winners, operands.q_starts, operands.q_lengths, as_bytes(operands.q_keep),
            documents.offsets, operands.candidates, as_bytes(operands.zero_floor),
            sums, counts, winners, num_slots, num_rows, slot_blocks,
            WANT_WINNERS=want_winners, SENTINEL=none, COUNT_RETRIEVED=count_retrieved,
            BLOCK_S=block_s, BLOCK_R=32, num_warps=4, maxnreg=ALL_REGISTERS,
        )  # fmt: skip
    return sums, counts, winners


def _thresholds_and_maxima(
    operands: ScoringOperands, documents: LiveRows, k: int, winners: Tensor | None, zeros_compete: bool
) -> tuple[Tensor, Tensor]:
    """Thresholds ``[Tq]`` and maxima ``[Nd, Tq]`` of all live query rows; their tokens are written to `winners`.

    With `zeros_compete`, a token that does not pass counts as 0 in the maximum of its document.
    """
    q_values, d_values = operands.q_values, operands.d_values
    num_rows, dim = q_values.shape
    device = q_values.device
    queries = live_rows_of(operands.q_starts, operands.q_lengths, operands.q_keep, operands.max_q_length)
    num_queries, num_documents = len(operands.q_starts), len(operands.d_starts)
    maxima = torch.empty((num_documents, num_rows), dtype=torch.float32, device=device)
    thresholds = torch.full((num_rows,), -torch.inf, dtype=torch.float32, device=device)
    most_rows, most_tokens = len(queries.rows), len(documents.rows)
    precision = float32_precision(q_values.dtype)
    arch, kind = architecture(device), arithmetic(q_values.dtype, precision)
    tile = maxima_tiles(arch, kind, dim, most_rows)
    collect = collect_tiles(arch, kind, dim, most_rows)
    want_winners = winners is not None
    constants = {"DIM": dim, "PRECISION": INPUT_PRECISION[precision]}
    # All products have chunks of one size, so that similarities are equal bit by bit.
    of_tile = constants | launch_options(tile)
    of_collect = constants | {"BLOCK_K": tile.block_k} | launch_options(collect)

    # With at most k tokens all pass, and thresholds stay -infinity.
    select = k < most_tokens
    num_groups = 8 * num_documents
    capacity = min(most_tokens, max(PLACES_OF_K * next_power_of_2(k), PLACES // most_rows))
    block = max(tile.block_m, collect.block_m)
    rows_at_once = cdiv(most_rows, block) * block
    if select:
        rows_at_once = min(rows_at_once, max(1, SCRATCH_BYTES // (2 * num_groups + 4 * capacity) // block) * block)
        groups = torch.empty((rows_at_once, num_groups), dtype=torch.int16, device=device)
        pool = torch.empty((rows_at_once, 1 + capacity), dtype=torch.int32, device=device)
        bounds, pending = torch.empty((2, rows_at_once), dtype=torch.int32, device=device)
    num_tiles = rows_at_once // tile.block_m
    per_program = documents_per_program(tile, num_tiles, num_documents)
    document_parts = cdiv(num_documents, per_program)
    num_collect_tiles = rows_at_once // collect.block_m
    token_parts = max(1, min(_PROGRAMS // num_collect_tiles, most_tokens // (4 * collect.block_n)))
    for first_row in range(0, most_rows, rows_at_once):
        token_maxima_kernel[(num_tiles * document_parts,)](
            q_values, *queries, d_values, *documents, operands.d_starts, maxima, winners, groups if select else None,
            first_row, num_queries, num_documents, num_tiles, num_rows, per_program,
            WANT_WINNERS=want_winners, **of_tile,
        )  # fmt: skip
        if not select:
            continue
        bound_kernel[(rows_at_once,)](
            groups, queries.offsets, bounds, pending, pool, first_row, num_queries, num_groups, k, capacity,
            BLOCK=min(4096, next_power_of_2(num_groups)), num_warps=4,
        )  # fmt: skip
        for _ in range(ROUNDS):
            collect_kernel[(num_collect_tiles * token_parts,)](
                q_values, queries.rows, d_values, *documents, bounds, pending, pool,
                first_row, num_documents, num_collect_tiles, token_parts, capacity, **of_collect,
            )  # fmt: skip
            select_kernel[(rows_at_once,)](
                queries.rows, bounds, pending, pool, thresholds, first_row, k, capacity,
                BLOCK=min(2048, next_power_of_2(capacity)), num_warps=4,
            )  # fmt: skip
        bisect_kernel[(num_collect_tiles,)](
            q_values, queries.rows, d_values, *documents, bounds, pending, thresholds,
            first_row, num_documents, k, **of_collect, maxnreg=ALL_REGISTERS,
        )  # fmt: skip
    if select and zeros_compete:
        num_tiles = cdiv(most_rows, tile.block_m)
        negative_maxima_kernel[(num_tiles * document_parts,)](
            q_values, *queries, d_values, *documents, thresholds, maxima, winners,
            num_queries, num_documents, num_tiles, num_rows, per_program,
            WANT_WINNERS=want_winners, SENTINEL=no_winner(winner_dtype(operands.max_d_length)), **of_tile,
        )  # fmt: skip
    return thresholds, maxima
