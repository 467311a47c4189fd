"""Projection to unit token vectors on CUDA: launches the Triton kernels. Never waits for the device."""

import torch
from torch import Tensor
from torch.nn import functional as F

from pylate_fastmaxsim._dtypes import float32_precision
from pylate_fastmaxsim.kernels.projection.backward import hidden_gradient_kernel, weight_gradient_kernel
from pylate_fastmaxsim.kernels.projection.forward import normalize_kernel, project_kernel
from pylate_fastmaxsim.kernels.projection.tiles import (
    hidden_gradient_tiles,
    project_tiles,
    rows_per_part,
    weight_gradient_tiles,
)
from pylate_fastmaxsim.kernels.runtime.arch import INPUT_PRECISION, architecture, arithmetic, cdiv, launch_options
from pylate_fastmaxsim.kernels.runtime.tensors import gradient_of, on_device_of


def forward(hidden: Tensor, weight: Tensor, bias: Tensor | None, normalize: bool) -> tuple[Tensor, Tensor]:
    """Embeddings ``[T, d]`` in the dtype of ``hidden``, and 1 over their norms, ``[T]`` (``[0]`` unless normalised)."""
    num_rows, dim_in = hidden.shape
    dim_out = weight.shape[0]
    embeddings = hidden.new_empty(num_rows, dim_out)
    inverse_norms = hidden.new_empty(num_rows if normalize else 0, dtype=torch.float32)
    if 0 in (num_rows, dim_out):
        return embeddings, inverse_norms
    precision = float32_precision(hidden.dtype)
    kind = arithmetic(hidden.dtype, precision)
    tile = project_tiles(architecture(hidden.device), kind, dim_in, dim_out)
    column_blocks = cdiv(dim_out, tile.block_d)
    squares = None
    if normalize and column_blocks > 1:
        squares = torch.empty(num_rows, column_blocks, dtype=torch.float32, device=hidden.device)
    with on_device_of(hidden):
        project_kernel[(cdiv(num_rows, tile.block_t) * column_blocks,)](
            hidden.contiguous(), weight.to(hidden.dtype).contiguous(), None if bias is None else bias.contiguous(),
            embeddings, inverse_norms, squares, num_rows, IN=dim_in, OUT=dim_out, NORMALIZE=normalize,
            PRECISION=INPUT_PRECISION[precision], **launch_options(tile),
        )  # fmt: skip
        if squares is not None:
            block_t = 16
            normalize_kernel[(cdiv(num_rows, block_t),)](
                embeddings, inverse_norms, squares, num_rows,
                OUT=dim_out, COLUMN_BLOCKS=column_blocks, BLOCK_T=block_t, BLOCK_D=128, num_warps=4,
            )  # fmt: skip
    return embeddings, inverse_norms


def backward(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    embeddings: Tensor,
    inverse_norms: Tensor,
    normalize: bool,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``hidden``, ``weight`` and bias (in the dtype of ``weight``); an empty tensor for one not needed."""
    num_rows, dim_in = hidden.shape
    dim_out = weight.shape[0]
    grad_hidden = gradient_of(hidden, need_hidden, True)
    grad_weight = weight.new_zeros(weight.shape if need_weight else 0)
    grad_bias = weight.new_zeros(dim_out if need_bias else 0)
    if need_bias and dim_in == 0 and 0 not in (num_rows, dim_out):
        # The kernel sums the bias beside the weight, which is empty here: give it a column of zeros.
        columns = F.pad(hidden, (0, 1)), F.pad(weight, (0, 1))
        *_, grad_bias = backward(grad, *columns, embeddings, inverse_norms, normalize, False, False, True)
    if 0 in (num_rows, dim_in, dim_out):
        return grad_hidden.zero_(), grad_weight, grad_bias
    precision = float32_precision(hidden.dtype)
    arch, kind = architecture(hidden.device), arithmetic(hidden.dtype, precision)
    sizes = {"IN": dim_in, "OUT": dim_out, "NORMALIZE": normalize, "PRECISION": INPUT_PRECISION[precision]}
    grad, embeddings = grad.contiguous(), embeddings.contiguous()
    scales = torch.empty(num_rows, dtype=torch.float32, device=hidden.device)
    shifts = torch.empty_like(scales)
    tile = hidden_gradient_tiles(arch, kind, dim_in, dim_out)
    with on_device_of(hidden):
        hidden_gradient_kernel[(cdiv(num_rows, tile.block_t),)](
            grad, embeddings, inverse_norms, weight.to(hidden.dtype).contiguous(),
            grad_hidden if need_hidden else None, scales, shifts, num_rows, **sizes, **launch_options(tile),
        )  # fmt: skip
        if need_weight or need_bias:
            tile = weight_gradient_tiles(arch, kind, dim_in, dim_out)
            num_tiles = cdiv(dim_out, tile.block_d) * cdiv(dim_in, tile.block_k)
            rows = rows_per_part(tile, num_rows, num_tiles)
            parts = cdiv(num_rows, rows)
            grad_weights = torch.empty(parts, dim_out, dim_in, dtype=torch.float32, device=hidden.device)
            grad_biases = None
            if need_bias:
                grad_biases = torch.empty(parts, dim_out, dtype=torch.float32, device=hidden.device)
            weight_gradient_kernel[(parts * num_tiles,)](
                grad, embeddings, hidden.contiguous(), scales, shifts, grad_weights, grad_biases, num_rows, rows,
                **sizes, **launch_options(tile),
            )  # fmt: skip
            if need_weight:
                grad_weight = grad_weights.sum(dim=0).to(weight.dtype)
            if need_bias:
                grad_bias = grad_biases.sum(dim=0).to(weight.dtype)
    return grad_hidden, grad_weight, grad_bias
