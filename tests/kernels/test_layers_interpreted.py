"""The kernels of encoder layers on a CPU through Triton's interpreter, against PyTorch. Run with TRITON_INTERPRET=1."""

import pytest
import torch
from torch.nn.functional import gelu, layer_norm

pytest.importorskip("triton")

from pylate_fastmaxsim.kernels.layers import launch
from tests.support.interpreter import interpreted  # noqa: F401

pytestmark = [pytest.mark.interpret, pytest.mark.usefixtures("interpreted")]


@pytest.fixture(autouse=True)
def small_and_nan(monkeypatch):
    """Several programs, and memory that shows what is not written."""
    monkeypatch.setattr(launch, "GLU_BLOCK", 64)
    monkeypatch.setattr(launch, "NORM_PROGRAMS", 3)
    for name in ("empty", "empty_like"):
        made = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *size, made=made, **options: made(*size, **options).fill_(torch.nan))


def close(found, wanted, dtype):
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), wanted.double(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_linear_unit(dtype):
    x, grad = torch.randn(7, 2 * 24).to(dtype), torch.randn(7, 24).to(dtype)
    leaf = x.double().requires_grad_()
    inputs, gate = leaf.chunk(2, dim=1)
    wanted = gelu(inputs) * gate
    close(launch.glu(x), wanted, dtype)
    grad_x, hidden = launch.glu_gradient(x, grad, need_hidden=True)
    assert torch.equal(hidden, launch.glu(x))
    close(grad_x, torch.autograd.grad(wanted, leaf, grad.double())[0], dtype)
    assert torch.equal(launch.glu_gradient(x, grad, need_hidden=False)[0], grad_x)


def test_activation_is_rounded_before_the_product():
    x = torch.randn(50, 2 * 24).half()
    inputs, gate = x.chunk(2, dim=1)
    assert torch.equal(launch.glu(x), gelu(inputs) * gate)


@pytest.mark.parametrize("rows, dim, branch_dtype", [(7, 24, torch.float16), (2, 16, None), (0, 16, None)])
@pytest.mark.parametrize("bias", [False, True])
def test_norm_and_residual(rows, dim, branch_dtype, bias):
    total, grad, grad_total = torch.randn(3, rows, dim)
    weight = torch.rand(dim) + 0.5
    leaves = [
        total.double().requires_grad_(),
        weight.double().requires_grad_(),
        torch.zeros(dim).double().requires_grad_(),
    ]
    norm = layer_norm(leaves[0], (dim,), *leaves[1:], 1e-5)
    wanted = torch.autograd.grad([norm, leaves[0]], leaves, [grad.bfloat16().double(), grad_total.double()])
    _, mean, rstd = torch.native_layer_norm(total, (dim,), weight, None, 1e-5)
    arguments = grad.bfloat16(), grad_total, total, mean, rstd, weight, branch_dtype
    grad_x, grad_branch, grad_weight, grad_bias = launch.norm_gradient(*arguments, True, bias)
    close(grad_x, wanted[0], torch.float32)
    close(grad_weight, wanted[1], torch.float32)
    if bias:
        close(grad_bias, wanted[2], torch.float32)
    assert (grad_bias is not None, grad_branch is not None) == (bias, branch_dtype is not None)
    if branch_dtype is not None:
        assert torch.equal(grad_branch, grad_x.to(branch_dtype))
