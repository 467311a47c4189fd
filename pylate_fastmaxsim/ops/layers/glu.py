"""A gated linear unit (GeGLU) with the projection behind it, as a differentiable operator that does not keep the unit."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear

from pylate_fastmaxsim.ops.dispatch import kernels, runs_kernels
from pylate_fastmaxsim.ops.registered import Operator, differentiable


def geglu_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``linear(gelu(x[:, :F]) * x[:, F:], weight, bias)``: the end of the MLP of ModernBERT.

    The backward keeps ``x`` and ``weight``, and computes the product of activation and gate again while it makes their
    gradient. The exact GELU, rounded to the dtype of ``x`` as PyTorch does. Without autocast of its own: the caller casts.
    Differentiable once in the three tensors.

    Parameters
    ----------
    x
        ``[T, 2 * F]``, of any floating dtype.
    weight, bias
        ``[C, F]`` and ``[C]`` or ``None``, of the same dtype.

    Returns
    -------
    Tensor
        ``[T, C]``, of the same dtype.

    Raises
    ------
    ValueError
        ``x`` and ``weight`` do not fit together.

    Examples
    --------
    >>> import torch
    >>> from pylate_fastmaxsim.ops.layers.glu import geglu_linear
    >>> geglu_linear(torch.randn(5, 2 * 8), torch.randn(3, 8), None).shape
    torch.Size([5, 3])
    """
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != 2 * weight.shape[1]:
        raise ValueError(
            f"geglu_linear: x must be [T, 2 * F] and weight [C, F], got shapes {tuple(x.shape)} and {tuple(weight.shape)}."
        )
    return torch.ops.pylate_fastmaxsim.geglu_linear(x, weight, bias)


def _plain(x: Tensor) -> Tensor:
    inputs, gate = x.chunk(2, dim=1)
    return gelu(inputs) * gate


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    hidden = kernels("layers").glu(x.contiguous()) if runs_kernels(x) else _plain(x)
    return linear(hidden, weight, bias)


def _backward(
    grad: Tensor, x: Tensor, weight: Tensor, need_x: bool, need_weight: bool, need_bias: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if runs_kernels(x):
        grad_x, hidden = kernels("layers").glu_gradient(x.contiguous(), grad @ weight, need_weight)
    else:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            hidden = _plain(leaf)
        (grad_x,) = torch.autograd.grad(hidden, leaf, grad @ weight)
    return (
        grad_x if need_x else None,
        grad.t() @ hidden.detach() if need_weight else None,
        grad.sum(dim=0) if need_bias else None,
    )


def _forward_fake(x, weight, bias):
    return x.new_empty(x.shape[0], weight.shape[0])


def _backward_fake(grad, x, weight, need_x, need_weight, need_bias):
    return (
        x.new_empty(x.shape) if need_x else None,
        x.new_empty(weight.shape) if need_weight else None,
        x.new_empty(weight.shape[0]) if need_bias else None,
    )


differentiable(
    Operator("geglu_linear", _forward, _forward_fake, devices=("cpu", "cuda")),
    ("output",),
    ("x", "weight", "bias"),
    Operator("geglu_linear_backward", _backward, _backward_fake, devices=("cpu", "cuda")),
)
