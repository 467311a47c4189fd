"""A LayerNorm and the residual stream that it reads, with one backward for both."""

from __future__ import annotations

import torch
from torch import Tensor

from pylate_fastmaxsim.ops.dispatch import kernels, runs_kernels
from pylate_fastmaxsim.ops.registered import Operator


def norm_with_residual(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    branch: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """``total = x + branch`` and its LayerNorm, whose backward adds the gradients of both as it makes them.

    The forward is plain PyTorch, so that a compiler fuses it with what is around it. The backward is one operator that
    reads and writes each gradient once. Without autocast of its own. Differentiable once in the tensors.

    Parameters
    ----------
    x
        The residual stream, ``[T, C]``, of any floating dtype.
    weight, bias
        ``[C]``, of the same dtype. ``bias`` may be ``None``.
    eps
        Added to the variance.
    branch
        What is added to ``x``, ``[T, C]``, of its own dtype. ``None``: nothing.
    dtype
        To which the norm is rounded. ``None``: that of ``x``.

    Returns
    -------
    tuple of Tensor
        ``(norm, total)``, ``[T, C]`` each. Go on with this ``total``, not with ``x + branch``.

    Raises
    ------
    ValueError
        Shapes do not fit together.

    Examples
    --------
    >>> import torch
    >>> from pylate_fastmaxsim.ops.layers.norm import norm_with_residual
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


def _backward(
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


def _backward_fake(grad, grad_total, total, mean, rstd, weight, branch_dtype, need_weight, need_bias):
    return (
        total.new_empty(total.shape),
        None if branch_dtype is None else total.new_empty(total.shape, dtype=branch_dtype),
        weight.new_empty(weight.shape) if need_weight else None,
        weight.new_empty(weight.shape) if need_bias else None,
    )


Operator("norm_with_residual_backward", _backward, _backward_fake, devices=("cpu", "cuda"))
