"""Parts of encoder layers as differentiable operators: a gated linear unit, and a LayerNorm with its residual stream."""

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear

from pylate_fastmaxsim.ops.operands import kernels, runs_kernels
from pylate_fastmaxsim.ops.registered import Operator, differentiable, fake_linear_gradients


def geglu_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``linear(gelu(x[:, :F]) * x[:, F:], weight, bias)``: the end of the MLP of ModernBERT, ``[T, C]``.

    ``x [T, 2 * F]``, ``weight [C, F]`` and ``bias [C]`` or None are of one floating dtype: without autocast of its own, the
    caller casts. The backward keeps ``x`` and ``weight``, and computes the product of activation and gate again while it
    makes their gradient. The exact GELU, rounded to the dtype of ``x`` as PyTorch does. Differentiable once.

    Examples
    --------
    >>> import torch
    >>> from pylate_fastmaxsim.ops.encoder.layers import geglu_linear
    >>> geglu_linear(torch.randn(5, 2 * 8), torch.randn(3, 8), None).shape
    torch.Size([5, 3])
    """
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != 2 * weight.shape[1]:
        raise ValueError(
            f"geglu_linear: x must be [T, 2 * F] and weight [C, F], got shapes {tuple(x.shape)} and {tuple(weight.shape)}."
        )
    return torch.ops.pylate_fastmaxsim.geglu_linear(x, weight, bias)


def _geglu(x: Tensor) -> Tensor:
    inputs, gate = x.chunk(2, dim=1)
    return gelu(inputs) * gate


def _geglu_forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    hidden = kernels("layers").glu(x.contiguous()) if runs_kernels(x) else _geglu(x)
    return linear(hidden, weight, bias)


def _geglu_backward(
    grad: Tensor, x: Tensor, weight: Tensor, need_x: bool, need_weight: bool, need_bias: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if runs_kernels(x):
        grad_x, hidden = kernels("layers").glu_gradient(x.contiguous(), grad @ weight, need_weight)
    else:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            hidden = _geglu(leaf)
        (grad_x,) = torch.autograd.grad(hidden, leaf, grad @ weight)
    return (
        grad_x if need_x else None,
        grad.t() @ hidden.detach() if need_weight else None,
        grad.sum(dim=0) if need_bias else None,
    )


def _geglu_forward_fake(x, weight, bias):
    return x.new_empty(x.shape[0], weight.shape[0])


differentiable(
    Operator("geglu_linear", _geglu_forward, _geglu_forward_fake),
    ("output",),
    ("x", "weight", "bias"),
    Operator("geglu_linear_backward", _geglu_backward, fake_linear_gradients),
)


def norm_with_residual(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    branch: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The LayerNorm of ``total = x + branch``, and ``total``, whose backward adds the gradients of both as it makes them.

    ``x [T, C]`` is the residual stream, ``weight`` and ``bias`` are ``[C]`` and of its dtype. ``branch [T, C]`` is of a dtype of
    its own, or None: nothing is added. The norm is rounded to ``dtype``, by default that of ``x``. Go on with ``total``, not
    with ``x + branch``.

    The forward is plain PyTorch, so that a compiler fuses it with what is around it. The backward is one operator that
    reads and writes each gradient once. Without autocast of its own. Differentiable once in the tensors.

    Examples
    --------
    >>> import torch
    >>> from pylate_fastmaxsim.ops.encoder.layers import norm_with_residual
    >>> x = torch.tensor([[1.0, 3.0]])
    >>> norm_with_residual(x, torch.ones(2), None, eps=0.0, branch=x, dtype=torch.bfloat16)
    (tensor([[-1.,  1.]], dtype=torch.bfloat16), tensor([[2., 6.]]))
    """
    if x.dim() != 2 or weight.shape != x.shape[1:] or (branch is not None and branch.shape != x.shape):
        raise ValueError(
            f"norm_with_residual: x and branch must be [T, C] and weight [C], got shapes {tuple(x.shape)}, "
            f"{None if branch is None else tuple(branch.shape)} and {tuple(weight.shape)}."
        )
    return _NormWithResidual.apply(x, weight, bias, eps, branch, dtype or x.dtype)


class _NormWithResidual(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps, branch, dtype):
        # A tensor of its own, not an argument: a compiler traces no function that returns what it was given.
        total = x.view_as(x) if branch is None else x + branch
        norm, mean, rstd = torch.native_layer_norm(total, weight.shape, weight, bias, eps)
        ctx.save_for_backward(total, mean, rstd, weight)
        ctx.branch_dtype = None if branch is None else branch.dtype
        # Without a cast that does nothing: a traced function that returns a tensor twice passes it no gradient (PyTorch 2.11).
        return norm if norm.dtype == dtype else norm.to(dtype), total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, grad_total):
        total, mean, rstd, weight = ctx.saved_tensors
        _, need_weight, need_bias, *_ = ctx.needs_input_grad
        branch_dtype = None if ctx.branch_dtype == total.dtype else ctx.branch_dtype
        grad_x, grad_branch, grad_weight, grad_bias = torch.ops.pylate_fastmaxsim.norm_with_residual_backward(
            grad, grad_total, total, mean, rstd, weight, branch_dtype, need_weight, need_bias
        )
        return (
            grad_x,
            grad_weight if need_weight else None,
            grad_bias if need_bias else None,
            None,
            None if ctx.branch_dtype is None else grad_x if branch_dtype is None else grad_branch,
            None,
        )


def _norm_backward(
    grad: Tensor, grad_total: Tensor, total: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor,
    branch_dtype: torch.dtype | None, need_weight: bool, need_bias: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    if runs_kernels(total):
        tensors = (each.contiguous() for each in (grad, grad_total, total, mean, rstd, weight))
        return kernels("layers").norm_gradient(*tensors, branch_dtype, need_weight, need_bias)
    grad_x, *of_weights = torch.ops.aten.native_layer_norm_backward(
        grad.to(total.dtype), total, weight.shape, mean, rstd, weight, weight, [True, need_weight, need_bias]
    )
    grad_x = grad_x + grad_total
    return grad_x, None if branch_dtype is None else grad_x.to(branch_dtype), *of_weights


def _norm_backward_fake(grad, grad_total, total, mean, rstd, weight, branch_dtype, need_weight, need_bias):
    return (
        total.new_empty(total.shape),
        None if branch_dtype is None else total.new_empty(total.shape, dtype=branch_dtype),
        weight.new_empty(weight.shape) if need_weight else None,
        weight.new_empty(weight.shape) if need_bias else None,
    )


Operator("norm_with_residual_backward", _norm_backward, _norm_backward_fake)
