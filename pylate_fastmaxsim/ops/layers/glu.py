"""A gated linear unit with the projection behind it, as a differentiable operator that keeps no product of the gate."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, silu

from pylate_fastmaxsim.ops.dispatch import runs_kernels

_ACTIVATIONS = {"gelu": gelu, "silu": silu}


def glu_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: Literal["gelu", "silu"]) -> Tensor:
    """``linear(act(x[:, :F]) * x[:, F:], weight, bias)``: the end of the MLP of ModernBERT (GeGLU) or Qwen3 (SwiGLU).

    The backward keeps ``x`` and ``weight``, and computes the product of activation and gate again while it makes their
    gradient. Without autocast of its own: the caller casts. Differentiable once in the three tensors.

    Parameters
    ----------
    x
        ``[T, 2 * F]``, of any floating dtype.
    weight, bias
        ``[C, F]`` and ``[C]`` or ``None``, of the same dtype.
    activation
        ``"gelu"``, the exact one, or ``"silu"``. It is rounded to the dtype of ``x``, as PyTorch does.

    Returns
    -------
    Tensor
        ``[T, C]``, of the same dtype.

    Raises
    ------
    ValueError
        ``x`` and ``weight`` do not fit together, or ``activation`` is none of the above.

    Examples
    --------
    >>> import torch
    >>> from pylate_fastmaxsim.ops.layers.glu import glu_linear
    >>> glu_linear(torch.randn(5, 2 * 8), torch.randn(3, 8), None, "gelu").shape
    torch.Size([5, 3])
    """
    if activation not in _ACTIVATIONS:
        raise ValueError(f"glu_linear: activation must be 'gelu' or 'silu', got {activation!r}.")
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != 2 * weight.shape[1]:
        raise ValueError(
            f"glu_linear: x must be [T, 2 * F] and weight [C, F], got shapes {tuple(x.shape)} and {tuple(weight.shape)}."
        )
    return torch.ops.pylate_fastmaxsim.glu_linear(x, weight, bias, activation)


@functools.cache
def _kernels() -> ModuleType:
    from pylate_fastmaxsim.kernels.layers import launch

    return launch


torch.library.define(
    "pylate_fastmaxsim::glu_linear",
    "(Tensor x, Tensor weight, Tensor? bias, str activation) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.define(
    "pylate_fastmaxsim::glu_linear_backward",
    "(Tensor grad, Tensor x, Tensor weight, str activation, bool need_x, bool need_weight, bool need_bias) "
    "-> (Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)


def _plain(x: Tensor, activation: str) -> Tensor:
    inputs, gate = x.chunk(2, dim=1)
    return _ACTIVATIONS[activation](inputs) * gate


@torch.library.impl("pylate_fastmaxsim::glu_linear", ("cpu", "cuda"))
def _forward(x, weight, bias, activation):
    hidden = _kernels().glu(x.contiguous(), activation == "silu") if runs_kernels(x) else _plain(x, activation)
    return linear(hidden, weight, bias)


@torch.library.impl("pylate_fastmaxsim::glu_linear_backward", ("cpu", "cuda"))
def _backward(grad, x, weight, activation, need_x, need_weight, need_bias):
    nothing = x.new_empty
    if runs_kernels(x):
        grad_x, hidden = _kernels().glu_gradient(x.contiguous(), grad @ weight, activation == "silu", need_weight)
    else:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            hidden = _plain(leaf, activation)
        (grad_x,) = torch.autograd.grad(hidden, leaf, grad @ weight)
    return (
        grad_x if need_x else nothing(0),
        grad.t() @ hidden.detach() if need_weight else nothing(0),
        grad.sum(dim=0) if need_bias else nothing(0),
    )


@torch.library.register_fake("pylate_fastmaxsim::glu_linear")
def _forward_fake(x, weight, bias, activation):
    return x.new_empty(x.shape[0], weight.shape[0])


@torch.library.register_fake("pylate_fastmaxsim::glu_linear_backward")
def _backward_fake(grad, x, weight, activation, need_x, need_weight, need_bias):
    return (
        x.new_empty(x.shape if need_x else 0),
        x.new_empty(weight.shape if need_weight else 0),
        x.new_empty(weight.shape[0] if need_bias else 0),
    )


def _save_for_backward(ctx, inputs, output):
    x, weight, _, ctx.activation = inputs
    ctx.save_for_backward(x, weight)


def _differentiate(ctx, grad):
    needs = ctx.needs_input_grad[:3]
    gradients = torch.ops.pylate_fastmaxsim.glu_linear_backward(grad, *ctx.saved_tensors, ctx.activation, *needs)
    return (*(gradient if need else None for gradient, need in zip(gradients, needs, strict=True)), None)


torch.library.register_autograd("pylate_fastmaxsim::glu_linear", _differentiate, setup_context=_save_for_backward)
