"""The operators of encoder layers on CUDA: against float64, repeatable, and compiled."""

import pytest
import torch

from pylate_fastmaxsim.ops.encoder_layers import geglu_linear, norm_with_residual
from tests.support.layer_cases import glu_case, gradients, norm_case

pytestmark = pytest.mark.cuda

CASES = {"glu": (geglu_linear, glu_case), "norm": (norm_with_residual, norm_case)}


@pytest.mark.parametrize("dim", [384, 768, 1000])
@pytest.mark.parametrize("function, case", CASES.values(), ids=CASES)
def test_against_float64(function, case, dim):
    arguments = case(5000, dim, "cuda")
    exact = gradients(function, case(5000, dim, "cpu", torch.float64, like=arguments))
    found = gradients(function, arguments)
    for ours, wanted in zip(found, exact, strict=True):
        error = (ours.double().cpu() - wanted).norm() / wanted.norm()
        assert error < (1e-2 if ours.dtype == torch.bfloat16 else 1e-3)


@pytest.mark.parametrize("function, case", CASES.values(), ids=CASES)
def test_repeats_bit_by_bit(function, case):
    first, second = (gradients(function, case(5000, 768, "cuda")) for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("function, case", CASES.values(), ids=CASES)
def test_compiled(function, case):
    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    for rows in (5000, 3333):
        arguments = case(rows, 768, "cuda")
        for ours, wanted in zip(gradients(compiled, arguments), gradients(function, arguments), strict=True):
            error = (ours.double() - wanted.double()).norm() / wanted.double().norm()
            assert error < 5e-3
