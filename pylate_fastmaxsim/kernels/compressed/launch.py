"""MaxSim over compressed documents on CUDA: launches the Triton kernels. Never waits for the device."""

import functools

import torch
from torch import Tensor

from pylate_fastmaxsim._operands import CompressedOperands, ScoringOperands
from pylate_fastmaxsim._winners import no_winner, winner_dtype
from pylate_fastmaxsim.compressed import rounded_queries
from pylate_fastmaxsim.kernels.compressed.conversions import decompress_kernel, round_rows_kernel
from pylate_fastmaxsim.kernels.compressed.query_gradient import compressed_query_gradient_kernel
from pylate_fastmaxsim.kernels.maxsim import launch as maxsim
from pylate_fastmaxsim.kernels.maxsim.forward import forward_kernel
from pylate_fastmaxsim.kernels.maxsim.plan import ForwardPlan, ForwardSizes, forward_plan, new_winners
from pylate_fastmaxsim.kernels.maxsim.tiles import ForwardTiles, fitted
from pylate_fastmaxsim.kernels.runtime.arch import architecture, cdiv, next_power_of_2, table_row
from pylate_fastmaxsim.kernels.runtime.tensors import as_bytes, contiguous, gradient_of, on_device_of

# Tokens that are decompressed at once, padding included: 256 MiB of 128 numbers of 16 bits.
TOKENS_AT_ONCE = 2**20

# Looked up by table_row. block_k shrinks to fit d.
_FORWARD = {
    (90, "int8"): [(256, ForwardTiles(256, 64, 256, 8, 8, 3, 128)), (None, ForwardTiles(128, 64, 128, 4, 8, 3))],
    (90, "int8 by token"): [
        (256, ForwardTiles(128, 64, 256, 8, 4, 3, 128)),
        (None, ForwardTiles(128, 64, 128, 4, 8, 3)),
    ],
    (90, "fp8"): [(256, ForwardTiles(128, 64, 256, 8, 4, 3, 128)), (None, ForwardTiles(128, 64, 128, 4, 8, 3))],
    **dict.fromkeys(
        ["int8", "int8 by token", "fp8"],
        [(128, ForwardTiles(128, 64, 128, 4, 8, 2)), (None, ForwardTiles(64, 64, 128, 2, 4, 2))],
    ),
    # More stages than one would hold the look-ups of several tiles, which wait for each other.
    "residual": [(128, ForwardTiles(64, 64, 128, 8, 4, 1)), (None, ForwardTiles(64, 32, 256, 4, 4, 1))],
}
_FORWARD_OF_SHORT_DOCUMENTS = {(90, "int8"): [(128, ForwardTiles(256, 32, 128, 8, 8, 2, 128))]}
# For launches with at most this many query rows, which are bound by memory.
_FORWARD_OF_FEW_ROWS = {
    (90, "int8"): [(128, ForwardTiles(64, 64, 128, 4, 4, 3))],
    (90, "int8 by token"): [(128, ForwardTiles(64, 64, 128, 4, 4, 3))],
    (90, "fp8"): [(128, ForwardTiles(64, 64, 128, 1, 4, 3))],
    (90, "residual"): [(128, ForwardTiles(64, 64, 128, 8, 4, 1, 128))],
}
# The fused kernel holds whole vectors of residual codes.
LARGEST_FUSED_DIM = 256
# Up to so many query rows decompressing in the tile costs less than writing vectors and reading them again.
FUSED_ROWS = 128


@functools.lru_cache(maxsize=256)
def forward_tiles(arch: int, kind: str, dim: int, rows_in_all: int, short_documents: bool) -> ForwardTiles:
    """Tiles of the forward for `rows_in_all` query rows that share their documents."""
    tiles = table_row(_FORWARD_OF_FEW_ROWS, arch, kind, dim)
    if tiles is None or rows_in_all > tiles.block_m:
        short = table_row(_FORWARD_OF_SHORT_DOCUMENTS, arch, kind, dim) if short_documents else None
        tiles = short or table_row(_FORWARD, arch, kind, dim)
    tiles = fitted(tiles, arch, dim, rows_in_all)
    # The least that instructions of 8 bits take, and of 16 bits after decompression.
    return tiles._replace(block_k=max(tiles.block_k, 32))


def gradient_rows(dim: int) -> int:
    """Query rows of a program of the query gradient."""
    return max(1, min(16, 1024 // next_power_of_2(dim)))


def forward(operands: CompressedOperands, want_winners: bool) -> tuple[Tensor, Tensor | None]:
    """Scores ``[Nq, P]`` (float32) and winners ``[P, Tq]``, which are ``None`` unless wanted."""
    operands = contiguous(operands)
    q_values = operands.q_values
    sizes = ForwardSizes.of(operands)
    nothing = sizes.nothing_to_score(operands, operands.stored)
    if not nothing and not _in_tiles(operands, sizes.query_rows):
        with on_device_of(q_values):
            return _decompressed_forward(operands, want_winners)
    winners = new_winners(operands, (sizes.num_slots, q_values.shape[0]), not nothing) if want_winners else None
    if nothing:
        return sizes.zero_scores(operands), winners
    index_dtype = winner_dtype(operands.max_d_length) if want_winners else None
    plan = _plan(architecture(q_values.device), operands.format, operands.per_token, operands.bits, sizes, index_dtype)
    with on_device_of(q_values):
        q_scales = None
        if operands.format != "residual":
            q_values, q_scales = round_rows(q_values, operands.stored.dtype, operands.scale)
        queries, documents, numbers, scores = plan.arguments(operands, sizes)
        forward_kernel[(plan.programs,)](
            q_values, q_scales, *queries, operands.stored, *_decoding(operands), *documents, None,
            scores, winners, None, None, *numbers, None, **plan.constants,
        )  # fmt: skip
        return plan.sum_of_blocks(scores), winners


def _in_tiles(operands: CompressedOperands, rows_in_all: int) -> bool:
    q_values = operands.q_values
    if operands.format == "residual":
        # Nothing is gained by decompressing a document once for one query.
        few = operands.candidates is not None or rows_in_all <= FUSED_ROWS
        return few and q_values.dtype != torch.float32 and q_values.shape[1] <= LARGEST_FUSED_DIM
    return operands.format == "int8" or has_fp8(q_values.device)


@functools.cache
def has_fp8(device: torch.device) -> bool:
    """Say whether the GPU multiplies e4m3."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


@functools.lru_cache(maxsize=1024)
def _plan(
    arch: int,
    format: str,
    per_token: bool,
    bits: int,
    sizes: ForwardSizes,
    winners: torch.dtype | None,
) -> ForwardPlan:
    kind = "int8 by token" if per_token else format
    tile = forward_tiles(arch, kind, sizes.dim, sizes.query_rows, sizes.short_documents)
    stored = {"FORMAT": format, "PER_TOKEN": per_token, "BITS": bits}
    # No product is of float32, whose precision would make another program.
    return forward_plan(tile, "highest", sizes, winners, **stored, POOLING="max", K=1)


def round_rows(values: Tensor, dtype: torch.dtype, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Vectors rounded to int8 or e4m3, and the scale of each row (float32) times `factor`."""
    num_rows, dim = values.shape
    rounded = torch.empty_like(values, dtype=dtype)
    scales = torch.empty(num_rows, dtype=torch.float32, device=values.device)
    block_k = min(next_power_of_2(dim), 1024)
    block_rows = max(1, 4096 // block_k)
    round_rows_kernel[(cdiv(num_rows, block_rows),)](
        values, rounded, scales, num_rows, factor,
        IS_INT8=dtype == torch.int8, DIM=dim, BLOCK_ROWS=block_rows, BLOCK_K=block_k, num_warps=4,
    )  # fmt: skip
    return rounded, scales


def _decoding(operands: CompressedOperands) -> tuple[Tensor | None, ...]:
    words = None if operands.byte_values is None else operands.byte_values.view(torch.int32)
    return operands.scales, operands.codes, operands.centroids, words


def _decompressed_forward(operands: CompressedOperands, want_winners: bool) -> tuple[Tensor, Tensor | None]:
    """Scores and winners of documents that are decompressed, some at a time, and scored as vectors."""
    q_values = operands.q_values
    if operands.format == "fp8":
        rounded, scales = rounded_queries(q_values, "fp8")
        # Exactly, since bfloat16 has more bits.
        q_values = (rounded.float() * scales[:, None]).to(torch.bfloat16)
    num_queries, num_slots = operands.q_starts.shape[0], operands.num_slots
    device, max_length = q_values.device, operands.max_d_length
    at_once = max(1, TOKENS_AT_ONCE // max_length)
    if operands.candidates is not None:
        at_once = max(1, at_once // num_queries)
    scores = torch.empty((num_queries, num_slots), dtype=torch.float32, device=device)
    winners = []
    for first in range(0, num_slots, at_once):
        slots = chosen = slice(first, min(first + at_once, num_slots))
        candidates = None
        if operands.candidates is not None:
            chosen = operands.candidates[:, slots].reshape(-1)
            candidates = torch.arange(chosen.shape[0], device=device).view(num_queries, -1)
        starts, lengths = operands.d_starts[chosen], operands.d_lengths[chosen]
        vectors, keep = _decompress(operands, starts, lengths, q_values.dtype)
        places = torch.arange(starts.shape[0], device=device) * max_length
        part = ScoringOperands(
            q_values, operands.q_starts, operands.q_lengths, operands.q_keep, vectors, places, lengths, keep,
            candidates, None, operands.max_q_length, max_length, operands.q_gapless, False,
        )  # fmt: skip
        scores[:, slots], won = maxsim.forward(part, want_winners)
        winners.append(won)
    return scores, torch.cat(winners) if want_winners else None


def _decompress(
    operands: CompressedOperands, starts: Tensor, lengths: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Vectors of some documents, each document at a multiple of the longest length, and which tokens count."""
    dim, rows = operands.q_values.shape[1], starts.shape[0] * operands.max_d_length
    vectors = torch.empty((rows, dim), dtype=dtype, device=starts.device)
    kept = None if operands.d_keep is None else torch.empty(rows, dtype=torch.uint8, device=starts.device)
    block_k = next_power_of_2(max(dim, 16))
    block_n = max(1, min(32, 4096 // block_k))
    blocks = cdiv(operands.max_d_length, block_n)
    decompress_kernel[(starts.shape[0] * blocks,)](
        _stored(operands), *_decoding(operands),
        starts, lengths, as_bytes(operands.d_keep), vectors, kept, blocks, operands.max_d_length, operands.scale,
        FORMAT=operands.format, BITS=operands.bits, DIM=dim, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=4,
    )  # fmt: skip
    return vectors, None if kept is None else kept.view(torch.bool)


def _stored(operands: CompressedOperands) -> Tensor:
    """Numbers as kernels of all GPUs take them: e4m3 as bytes."""
    return operands.stored.view(torch.uint8) if operands.format == "fp8" else operands.stored


def backward(grad_scores: Tensor, winners: Tensor, operands: CompressedOperands) -> Tensor:
    """Gradient of ``q_values``, of the winners' vectors as they decompress. Rounding of queries passes it on unchanged."""
    operands = contiguous(operands)
    q_values = operands.q_values
    dim = q_values.shape[1]
    nothing_scored = 0 in (*grad_scores.shape, operands.max_q_length, operands.max_d_length, winners.numel(), dim)
    grad_q = gradient_of(q_values, True, operands.q_gapless and not nothing_scored)
    if nothing_scored:
        return grad_q
    block_rows = gradient_rows(dim)
    row_blocks = cdiv(operands.max_q_length, block_rows)
    with on_device_of(q_values):
        compressed_query_gradient_kernel[(operands.q_starts.shape[0] * row_blocks,)](
            grad_scores.contiguous(), winners, operands.q_starts, operands.q_lengths,
            _stored(operands), *_decoding(operands),
            operands.d_starts, operands.candidates, grad_q,
            grad_scores.shape[1], winners.shape[1], row_blocks, operands.scale,
            FORMAT=operands.format, PER_TOKEN=operands.per_token, BITS=operands.bits, DIM=dim,
            SENTINEL=no_winner(winners.dtype), BLOCK_ROWS=block_rows, BLOCK_K=max(16, next_power_of_2(dim)), UNROLL=4,
            num_warps=4,
        )  # fmt: skip
    return grad_q
