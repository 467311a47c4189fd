"""Operators of encoder layers on a CPU: against plain PyTorch, in graphs, and with less than all gradients."""

import pytest
import torch
from torch.nn.functional import gelu, layer_norm, linear

from pylate_fastmaxsim.ops.encoder_layers import geglu_linear, norm_with_residual
from tests.support.layer_cases import glu_case, gradients, norm_case


def plain_glu(x, weight, bias):
    inputs, gate = x.chunk(2, dim=1)
    return linear(gelu(inputs) * gate, weight, bias)


def plain_norm(x, weight, bias, eps, branch, dtype):
    total = x if branch is None else x + branch
    return layer_norm(total, weight.shape, weight, bias, eps).to(dtype), total


CASES = {
    "glu": (geglu_linear, plain_glu, glu_case, {}),
    "glu without bias": (geglu_linear, plain_glu, glu_case, {"bias": False}),
    "norm": (norm_with_residual, plain_norm, norm_case, {}),
    "norm without bias": (norm_with_residual, plain_norm, norm_case, {"bias": False}),
}
of_all = pytest.mark.parametrize("function, plain, case, options", CASES.values(), ids=CASES)


@of_all
def test_as_plain_pytorch(function, plain, case, options):
    arguments = case(9, 24, "cpu", torch.float64, **options)
    for found, wanted in zip(gradients(function, arguments), gradients(plain, arguments), strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("compiled", [False, True])
def test_without_branch(compiled):
    arguments = list(norm_case(9, 24, "cpu", torch.float64))
    arguments[4] = None
    function = (
        torch.compile(norm_with_residual, backend="aot_eager", fullgraph=True) if compiled else norm_with_residual
    )
    for found, wanted in zip(gradients(function, arguments), gradients(plain_norm, arguments), strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-12)


@of_all
def test_gradients_that_are_not_needed(function, plain, case, options):
    arguments = case(9, 24, "cpu", torch.float64, **options)
    all_of_them = gradients(function, arguments)
    results = len(all_of_them) - sum(isinstance(each, torch.Tensor) for each in arguments)
    places = [place for place, each in enumerate(arguments) if isinstance(each, torch.Tensor)]
    for kept, place in enumerate(places):
        alone = [each.detach() if isinstance(each, torch.Tensor) else each for each in arguments]
        alone[place].requires_grad_()
        assert torch.equal(gradients(function, alone)[results], all_of_them[results + kept])


@of_all
@pytest.mark.parametrize("dtype", [torch.float32, None])
def test_one_graph(function, plain, case, options, dtype):
    """``None``: norms with a branch of another dtype."""
    if dtype is None and case is glu_case:
        dtype = torch.bfloat16
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (9, 14):
        arguments = case(rows, 24, "cpu", dtype, **options)
        for found, wanted in zip(gradients(compiled, arguments), gradients(function, arguments), strict=True):
            torch.testing.assert_close(found, wanted)


def test_registration():
    for bias in (False, True):
        torch.library.opcheck(
            torch.ops.pylate_fastmaxsim.geglu_linear, glu_case(9, 24, "cpu", torch.float64, bias=bias)
        )
    x, weight, _, _, branch, _ = (
        each.detach() if isinstance(each, torch.Tensor) else each for each in norm_case(9, 24, "cpu")
    )
    _, mean, rstd = torch.native_layer_norm(x, (24,), weight, None, 1e-5)
    for options in ((None, True, False), (torch.bfloat16, False, True)):
        arguments = branch, x, x, mean, rstd, weight, *options
        torch.library.opcheck(torch.ops.pylate_fastmaxsim.norm_with_residual_backward, arguments)


def test_what_does_not_fit():
    x, weight = torch.zeros(5, 16), torch.zeros(3, 8)
    with pytest.raises(ValueError, match=r"geglu_linear: x must be .* got shapes \(5, 14\) and \(3, 8\)"):
        geglu_linear(x[:, :14], weight, None)
    with pytest.raises(ValueError, match=r"norm_with_residual: .* got shapes \(5, 16\), \(3, 8\) and \(16,\)"):
        norm_with_residual(x, torch.ones(16), None, 1e-5, weight)
