"""The kernels of encoder layers in Triton's interpreter (TRITON_INTERPRET=1), against PyTorch, and on a GPU."""

import pytest
import torch
from torch.nn.functional import gelu, layer_norm

pytest.importorskip("triton")

from pylate_fastmaxsim.kernels.layers import launch
from pylate_fastmaxsim.ops.encoder.layers import geglu_linear, norm_with_residual
from tests.support.interpreter import interpreted  # noqa: F401
from tests.support.layer_cases import glu_case, gradients, norm_case
from tests.support.operator_checks import uninitialized_memory_as_nan


@pytest.fixture
def small_and_nan(interpreted, monkeypatch):  # noqa: F811
    """Several programs, and memory that shows what is not written."""
    monkeypatch.setattr(launch, "GLU_BLOCK", 64)
    monkeypatch.setattr(launch, "NORM_PROGRAMS", 3)
    with uninitialized_memory_as_nan():
        yield


def close(found, wanted, dtype):
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), wanted.double(), atol=tolerance, rtol=tolerance)


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_linear_unit(small_and_nan, dtype):
    x, grad = torch.randn(7, 2 * 24).to(dtype), torch.randn(7, 24).to(dtype)
    leaf = x.double().requires_grad_()
    inputs, gate = leaf.chunk(2, dim=1)
    wanted = gelu(inputs) * gate
    close(launch.glu(x), wanted, dtype)
    grad_x, hidden = launch.glu_gradient(x, grad, need_hidden=True)
    assert torch.equal(hidden, launch.glu(x))
    close(grad_x, torch.autograd.grad(wanted, leaf, grad.double())[0], dtype)
    assert torch.equal(launch.glu_gradient(x, grad, need_hidden=False)[0], grad_x)


@pytest.mark.interpret
def test_activation_is_rounded_before_the_product(small_and_nan):
    x = torch.randn(50, 2 * 24).half()
    inputs, gate = x.chunk(2, dim=1)
    assert torch.equal(launch.glu(x), gelu(inputs) * gate)


@pytest.mark.interpret
@pytest.mark.parametrize("rows, dim, branch_dtype", [(7, 24, torch.float16), (2, 16, None), (0, 16, None)])
@pytest.mark.parametrize("bias", [False, True])
def test_norm_and_residual(small_and_nan, rows, dim, branch_dtype, bias):
    total, grad, grad_total = torch.randn(3, rows, dim)
    weight = torch.rand(dim) + 0.5
    leaves = [each.double().requires_grad_() for each in (total, weight, torch.zeros(dim))]
    norm = layer_norm(leaves[0], (dim,), *leaves[1:], 1e-5)
    wanted = torch.autograd.grad([norm, leaves[0]], leaves, [grad.bfloat16().double(), grad_total.double()])
    _, mean, rstd = torch.native_layer_norm(total, (dim,), weight, None, 1e-5)
    arguments = grad.bfloat16(), grad_total, total, mean, rstd, weight, branch_dtype
    grad_x, grad_branch, *of_weights = launch.norm_gradient(*arguments, True, bias)
    assert (of_weights[1] is not None, grad_branch is not None) == (bias, branch_dtype is not None)
    for found, exact in zip((grad_x, *of_weights), wanted, strict=True):
        if found is not None:
            close(found, exact, torch.float32)
    if branch_dtype is not None:
        assert torch.equal(grad_branch, grad_x.to(branch_dtype))


CASES = {"glu": (geglu_linear, glu_case), "norm": (norm_with_residual, norm_case)}


@pytest.mark.cuda
@pytest.mark.parametrize("dim", [384, 768, 1000])
@pytest.mark.parametrize("function, case", CASES.values(), ids=CASES)
def test_on_a_gpu(function, case, dim):
    """Against float64, the same bits again, and compiled."""
    arguments = case(5000, dim, "cuda")
    exact = gradients(function, case(5000, dim, "cpu", torch.float64, like=arguments))
    found = gradients(function, arguments)
    compiled = gradients(torch.compile(function, fullgraph=True, dynamic=True), arguments)
    assert all(map(torch.equal, found, gradients(function, arguments)))
    for ours, other, wanted in zip(found, compiled, exact, strict=True):
        bound = 1e-2 if ours.dtype == torch.bfloat16 else 1e-3
        assert (ours.double().cpu() - wanted).norm() < bound * wanted.norm()
        assert (other.double() - ours.double()).norm() < 5e-3 * ours.double().norm()
