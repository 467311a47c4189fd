"""Compares the projection's kernels or CPU path with the float64 definition.

A path is ``kernels.projection.launch`` or ``cpu.projection``.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from pylate_fastmaxsim import reference
from tests.support.exactness import relative_error

# Relative error, in the Frobenius norm.
TOLERANCE = {
    (torch.float32, "highest"): 1e-6,
    (torch.float32, "high"): 3e-5,
    (torch.float32, "medium"): 2e-3,
    (torch.bfloat16, "highest"): 6e-3,
    (torch.float16, "highest"): 1e-3,
}


def problem(
    rows: int,
    dim_in: int,
    dim_out: int,
    dtype: torch.dtype = torch.float32,
    bias: bool = True,
    dead: float = 0.0,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Hidden states, weight, bias and a gradient of the embeddings, of which a share ``dead`` of the rows is 0."""
    generator = torch.Generator(device).manual_seed(rows * dim_in + dim_out)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator)

    grad = normal(rows, dim_out)
    grad[torch.rand(rows, device=device, generator=generator) < dead] = 0
    tensors = (normal(rows, dim_in), normal(dim_out, dim_in), normal(dim_out) if bias else None, grad)
    return tuple(None if tensor is None else tensor.to(dtype) for tensor in tensors)


def check(
    path: ModuleType,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    grad: Tensor,
    normalize: bool = True,
    precision: str = "highest",
    tolerance: float | None = None,
) -> None:
    """AssertionError unless embeddings and all gradients of ``path`` are those of the definition."""
    tolerance = tolerance or TOLERANCE[hidden.dtype, precision]
    live = (grad != 0).any(dim=1)
    # Rows without a gradient may hold anything.
    exact_hidden = torch.where(live[:, None], hidden, 0).double().requires_grad_()
    exact_weight, exact_bias = (None if t is None else t.double().requires_grad_() for t in (weight, bias))
    expected = reference.project(exact_hidden, exact_weight, exact_bias, normalize)
    expected.backward(grad.double())

    saved = path.forward(hidden, weight, bias, normalize, precision)
    assert saved[0].dtype == hidden.dtype and saved[0].shape == expected.shape
    assert relative_error(saved[0][live], expected[live].detach()) < tolerance, "embeddings"
    needs = (True, True, bias is not None)
    gradients = path.backward(grad, hidden, weight, *saved, normalize, precision, *needs)
    assert not gradients[0][~live].any(), "hidden states without a gradient"
    for name, own, leaf in zip(
        ("hidden", "weight", "bias"), gradients, (exact_hidden, exact_weight, exact_bias), strict=True
    ):
        if leaf is not None:
            assert own.shape == leaf.shape and own.dtype == hidden.dtype
            assert relative_error(own, leaf.grad) < tolerance, f"{name} gradient"
