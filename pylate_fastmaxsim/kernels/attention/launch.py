"""Attention within each of many texts on CUDA: launches the Triton kernels. Never waits for the device."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pylate_fastmaxsim._operands import Texts
from pylate_fastmaxsim.kernels.attention.forward import attention_kernel, rotary_kernel
from pylate_fastmaxsim.kernels.attention.gradient import attention_gradient_kernel
from pylate_fastmaxsim.kernels.runtime.arch import cdiv, launch_options
from pylate_fastmaxsim.kernels.runtime.tensors import on_device_of


class Tile(NamedTuple):
    """`block` rows by as many keys."""

    block: int
    num_warps: int
    max_registers: int | None = None


class Tiles(NamedTuple):
    """Tiles of texts that fit one tile, in ascending order, and the tile of all longer texts."""

    short: tuple[Tile, ...]
    long: Tile


# By the columns of a tile, for 16-bit vectors, chosen on an H100 (benchmarks/results/attention_tiles.json).
# The tiles of BACKWARD for short texts hold what those of FORWARD do: only long texts have log-sums.
FORWARD = {
    32: Tiles((Tile(64, 4), Tile(128, 4)), Tile(64, 4)),
    64: Tiles((Tile(32, 2), Tile(64, 4), Tile(128, 8)), Tile(64, 4, 128)),
    128: Tiles((Tile(64, 4), Tile(128, 4)), Tile(64, 4)),
}
BACKWARD = {
    32: Tiles((Tile(32, 2), Tile(64, 4), Tile(128, 8)), Tile(64, 4)),
    64: Tiles((Tile(32, 2), Tile(64, 4), Tile(128, 8)), Tile(64, 4)),
    128: Tiles((Tile(32, 2), Tile(64, 4, 168), Tile(128, 8)), Tile(64, 4)),
}
# Gradients that are turned back as they are stored take more registers.
ROTARY_BACKWARD = BACKWARD | {64: Tiles((Tile(32, 2, 128), Tile(64, 4, 128), Tile(128, 8)), Tile(64, 4))}
# Programs of a launch of long texts, of which some find no tile. With many more, those took a third of its time in a batch
# of 768 texts; with fewer, the tiles of a text wait for each other in a batch of 96, while the GPU is half empty.
MOST_PROGRAMS = 2**14
# Queries and keys that a program turns.
TURNED = 32


def forward(
    query: Tensor, key: Tensor, value: Tensor, *texts, tiles: Tiles | None = None, **dropout
) -> tuple[Tensor, Tensor]:
    """States ``[T, heads, d]``, and log-sums ``[heads, T]`` for the backward of texts that are longer than a tile.

    ``texts`` and ``dropout`` are the fields of :class:`Texts`.
    """
    return _forward(tuple(map(laid_out, (query, key, value))), Texts(*texts, **dropout), tiles)


def rotary_forward(
    qkv: Tensor, cos: Tensor, sin: Tensor, *texts, tiles: Tiles | None = None, **dropout
) -> tuple[Tensor, Tensor]:
    """States and log-sums of ``qkv [T, 3, heads, d]``, contiguous, whose queries and keys are turned in place first."""
    rows, _, heads, dim = qkv.shape
    with on_device_of(qkv):
        grid = (cdiv(rows * 2 * heads, TURNED),)
        rotary_kernel[grid](
            qkv, cos.contiguous(), sin.contiguous(), rows, HEADS=heads, DIM=dim, BLOCK=TURNED, num_warps=4
        )
    return _forward(qkv.unbind(1), Texts(*texts, **dropout), tiles)


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sums: Tensor,
    *texts,
    tiles: Tiles | None = None,
    **dropout,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, in the strides of :func:`laid_out`."""
    vectors = tuple(map(laid_out, (query, key, value)))
    gradients = tuple(map(torch.empty_like, vectors))
    _backward(grad, vectors, gradients, out, log_sums, (None, None), Texts(*texts, **dropout), tiles or BACKWARD)
    return gradients


def rotary_backward(
    grad: Tensor,
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    out: Tensor,
    log_sums: Tensor,
    *texts,
    tiles: Tiles | None = None,
    **dropout,
) -> Tensor:
    """The gradient of ``qkv`` as it was before :func:`rotary_forward` turned it. All of it is written."""
    gradient = torch.empty_like(qkv)
    angles = cos.contiguous(), sin.contiguous()
    vectors, gradients = qkv.unbind(1), gradient.unbind(1)
    _backward(grad, vectors, gradients, out, log_sums, angles, Texts(*texts, **dropout), tiles or ROTARY_BACKWARD)
    return gradient


def _forward(vectors: tuple[Tensor, ...], texts: Texts, tiles: Tiles | None) -> tuple[Tensor, Tensor]:
    query, key, value = vectors
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    log_sums = query.new_zeros((query.shape[1], query.shape[0]), dtype=torch.float32)
    arguments = (*vectors, out, log_sums, texts.seed, texts.cu_seqlens, texts.key_cu_seqlens)
    arguments += (query.stride(1), key.stride(1), value.stride(1), query.shape[0], max(texts.reach, 0))
    rows = {"Q_ROW": query.stride(0), "K_ROW": key.stride(0), "V_ROW": value.stride(0)}
    with on_device_of(query):
        for grid, constants in _launches(query, texts, tiles or FORWARD):
            attention_kernel[grid](*arguments, **rows, **constants)
    return out, log_sums


def _backward(
    grad: Tensor,
    vectors: tuple[Tensor, ...],
    gradients: tuple[Tensor, ...],
    out: Tensor,
    log_sums: Tensor,
    angles: tuple[Tensor | None, Tensor | None],
    texts: Texts,
    tiles: Tiles | dict[int, Tiles],
) -> None:
    query, key, value = vectors
    grad = laid_out(grad)
    arguments = (*vectors, out, grad, log_sums, texts.seed, *angles, texts.cu_seqlens, texts.key_cu_seqlens, *gradients)
    arguments += (query.stride(1), key.stride(1), value.stride(1), grad.stride(1))
    arguments += (query.shape[0], key.shape[0], max(texts.reach, 0))
    rows = {"Q_ROW": query.stride(0), "K_ROW": key.stride(0), "V_ROW": value.stride(0), "GRAD_ROW": grad.stride(0)}
    with on_device_of(query):
        for grid, constants in _launches(query, texts, tiles):
            attention_gradient_kernel[grid](*arguments, **rows, **constants)


def laid_out(values: Tensor) -> Tensor:
    """Vectors ``[T, heads, d]`` with strides that the kernels take: row by row, or head by head as after rotary positions."""
    rows, heads, dim = values.shape
    if values.stride() in ((heads * dim, dim, 1), (dim, rows * dim, 1)):
        return values
    return values.contiguous()


def _launches(
    query: Tensor, texts: Texts, tiles: Tiles | dict[int, Tiles]
) -> Iterator[tuple[tuple[int, int], dict[str, object]]]:
    """The grid of each launch, and its constants, always in one order. ``tiles`` may be a table."""
    rows, heads, dim = query.shape
    columns, count = next(columns for columns in (16, 32, 64, 128) if dim <= columns), len(texts.cu_seqlens) - 1
    if isinstance(tiles, dict):
        tiles = tiles[max(32, columns)]
    longer_than = -1
    for is_long, tile in (*((False, tile) for tile in tiles.short), (True, tiles.long)):
        if longer_than >= texts.max_length:
            break
        programs = 1
        if is_long:
            # As many for each text and head as the longest text has tiles, but at most what texts have on average, or
            # MOST_PROGRAMS in all, whichever is more.
            most = max(1, rows // max(1, count * tile.block), MOST_PROGRAMS // max(1, count * heads))
            programs = min(cdiv(texts.max_length, tile.block), most)
        constants = {"HEADS": heads, "DIM": dim, "COLUMNS": columns, "SCALE": texts.scale}
        constants |= {"HAS_WINDOW": texts.reach >= 0, "DROPOUT": texts.dropout, "LONGER_THAN": longer_than}
        yield (count * heads, programs), constants | {"LONG": is_long, **launch_options(tile)}
        longer_than = tile.block
