"""Element-wise parts of encoder layers on CUDA: launches the Triton kernels. Never waits for the device."""

import torch
from torch import Tensor

from pylate_fastmaxsim.kernels.layers.glu import glu_gradient_kernel, glu_kernel
from pylate_fastmaxsim.kernels.layers.norm import norm_gradient_kernel, sum_parts_kernel
from pylate_fastmaxsim.kernels.runtime.arch import cdiv, next_power_of_2
from pylate_fastmaxsim.kernels.runtime.tensors import on_device_of

# Measured on an H100. There both gradients run at the rate at which memory is copied.
GLU_BLOCK = 1024
# Of gradients of norms: five for each multiprocessor, as many as its registers hold at 768 columns. Each sums its rows for
# the weight.
NORM_PROGRAMS = 660
# Tiles of the kernel that adds these sums, in 5 microseconds where PyTorch takes 13.
SUM_ROWS, SUM_BLOCK = 128, 16


def glu(x: Tensor) -> Tensor:
    """``gelu(x[:, :F]) * x[:, F:]``, ``[T, F]``, of a contiguous ``x [T, 2 * F]``."""
    hidden = x.new_empty(x.shape[0], x.shape[1] // 2)
    if hidden.numel():
        with on_device_of(x):
            grid = (cdiv(hidden.numel(), GLU_BLOCK),)
            glu_kernel[grid](x, hidden, x.shape[0], F=hidden.shape[1], BLOCK=GLU_BLOCK, num_warps=4)
    return hidden


def glu_gradient(x: Tensor, grad_hidden: Tensor, need_hidden: bool) -> tuple[Tensor, Tensor | None]:
    """The gradient of ``x``, and on request what :func:`glu` gave."""
    grad_x = torch.empty_like(x)
    hidden = torch.empty_like(grad_hidden) if need_hidden else None
    if grad_hidden.numel():
        with on_device_of(x):
            grid = (cdiv(grad_hidden.numel(), GLU_BLOCK),)
            glu_gradient_kernel[grid](
                x, grad_hidden, grad_x, hidden, x.shape[0], F=grad_hidden.shape[1], BLOCK=GLU_BLOCK, num_warps=4
            )
    return grad_x, hidden


def norm_gradient(
    grad: Tensor,
    grad_total: Tensor,
    total: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    branch_dtype: torch.dtype | None,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of ``total [T, C]``, of it in ``branch_dtype``, of weight and of bias; None for what is not asked for.

    All tensors are contiguous.
    """
    rows, dim = total.shape
    grad_x = torch.empty_like(total)
    grad_branch = None if branch_dtype is None else torch.empty_like(total, dtype=branch_dtype)
    weight_parts, bias_parts = (
        torch.empty(NORM_PROGRAMS, dim, dtype=torch.float32, device=total.device) if need else None
        for need in (need_weight, need_bias)
    )
    with on_device_of(total):
        norm_gradient_kernel[(NORM_PROGRAMS,)](
            total, weight, mean, rstd, grad, grad_total, grad_x, grad_branch, weight_parts, bias_parts, rows,
            DIM=dim, BLOCK=next_power_of_2(dim), num_warps=norm_warps(dim),
        )  # fmt: skip
    return grad_x, grad_branch, *(_sum(parts, weight.dtype) for parts in (weight_parts, bias_parts))


def _sum(parts: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if parts is None:
        return None
    count, dim = parts.shape
    sums = parts.new_empty(dim, dtype=dtype)
    with on_device_of(parts):
        sum_parts_kernel[(cdiv(dim, SUM_BLOCK),)](
            parts, sums, count, DIM=dim, ROWS=SUM_ROWS, BLOCK=SUM_BLOCK, num_warps=8
        )
    return sums


def norm_warps(dim: int) -> int:
    """Warps of a program that reads rows of ``dim`` numbers: eight numbers for each thread."""
    return min(max(next_power_of_2(dim) // 256, 1), 16)
