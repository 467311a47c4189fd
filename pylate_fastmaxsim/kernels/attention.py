"""Attention inside each of many texts on CUDA: launches the Triton kernels, shorter texts first. Never waits."""

from typing import NamedTuple

import torch
from torch import Tensor

from pylate_fastmaxsim.kernels import launch
from pylate_fastmaxsim.kernels.launcher import Launcher
from pylate_fastmaxsim.kernels.long_attention import long_attention_gradient_kernel, long_attention_kernel
from pylate_fastmaxsim.kernels.operands import on_device_of
from pylate_fastmaxsim.kernels.short_attention import short_attention_gradient_kernel, short_attention_kernel


class Tile(NamedTuple):
    """`block` rows by as many keys."""

    block: int
    num_warps: int
    max_registers: int | None = None


class Tiles(NamedTuple):
    """Those of texts that fit one tile in ascending order, and that of all longer ones."""

    short: tuple[Tile, ...]
    long: Tile


# Chosen on sm_90 for 16-bit vectors of 64 numbers.
FORWARD = Tiles((Tile(64, 4), Tile(128, 8)), Tile(64, 4, 128))
BACKWARD = Tiles((Tile(32, 2), Tile(64, 4, 168), Tile(128, 8)), Tile(64, 4))


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    key_cu_seqlens: Tensor,
    max_length: int,
    scale: float,
    reach: int,
    tiles: Tiles = FORWARD,
) -> tuple[Tensor, Tensor]:
    """States ``[T, heads, d]``, and what the backward needs of texts that are not short, ``[heads, T]``."""
    query, key, value = map(laid_out, (query, key, value))
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    log_sums = query.new_zeros((query.shape[1], query.shape[0]), dtype=torch.float32)
    _launch(
        (short_attention_kernel, long_attention_kernel),
        (query, key, value, out, log_sums, cu_seqlens, key_cu_seqlens),
        {"Q_ROW": query, "K_ROW": key, "V_ROW": value},
        (max_length, scale, reach),
        tiles,
    )
    return out, log_sums


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sums: Tensor,
    cu_seqlens: Tensor,
    key_cu_seqlens: Tensor,
    max_length: int,
    scale: float,
    reach: int,
    tiles: Tiles = BACKWARD,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, each laid out like :func:`laid_out` of it."""
    grad, query, key, value = map(laid_out, (grad, query, key, value))
    gradients = tuple(map(torch.empty_like, (query, key, value)))
    _launch(
        (short_attention_gradient_kernel, long_attention_gradient_kernel),
        (query, key, value, out, grad, log_sums, cu_seqlens, key_cu_seqlens, *gradients),
        {"Q_ROW": query, "K_ROW": key, "V_ROW": value, "GRAD_ROW": grad},
        (max_length, scale, reach),
        tiles,
    )
    return gradients


def laid_out(values: Tensor) -> Tensor:
    """Vectors ``[T, heads, d]`` as kernels and gradients have them: row by row or, as rotary ones, head by head."""
    rows, heads, dim = values.shape
    if values.stride() in ((heads * dim, dim, 1), (dim, rows * dim, 1)):
        return values
    return values.contiguous()


def _launch(
    kernels: tuple[Launcher, Launcher],
    tensors: tuple[Tensor, ...],
    strided: dict[str, Tensor],
    options: tuple[int, float, int],
    tiles: Tiles,
) -> None:
    max_length, scale, reach = options
    query, cu_seqlens = tensors[0], next(each for each in tensors if each.dtype == torch.int32)
    rows, heads, dim = query.shape
    numbers = (*(values.stride(1) for values in strided.values()), rows, max(reach, 0))
    constants = {name: values.stride(0) for name, values in strided.items()}
    constants |= {"HEADS": heads, "DIM": dim, "SCALE": scale, "HAS_WINDOW": reach >= 0}
    programs = (len(cu_seqlens) - 1) * heads
    longer_than = -1
    with on_device_of(query):
        for tile in (*tiles.short, tiles.long):
            if longer_than >= max_length:
                break
            is_long = tile is tiles.long
            grid = (programs, launch.cdiv(max_length, tile.block)) if is_long else (programs,)
            kernels[is_long][grid](
                *tensors,
                *numbers,
                **constants,
                LONGER_THAN=longer_than,
                BLOCK=tile.block,
                num_warps=tile.num_warps,
                maxnreg=tile.max_registers,
            )
            longer_than = tile.block
