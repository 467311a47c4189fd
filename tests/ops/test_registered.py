"""Operators from annotated functions: their schema, and the order of what a backward is given."""

from typing import NamedTuple

import pytest
import torch
from torch import SymInt, Tensor

from pylate_fastmaxsim.ops.registered import Operator, differentiable


class Numbers(NamedTuple):
    k: int
    temperature: float


def forward(
    x: Tensor, numbers: Numbers, length: int | SymInt, bias: Tensor | None, want_state: bool = True
) -> tuple[Tensor, Tensor | None]:
    y = x * x * numbers.temperature
    return (y if bias is None else y + bias), x + numbers.k if want_state else None


def backward(
    grad: Tensor, numbers: Numbers, bias: Tensor | None, state: Tensor, need_x: bool, need_bias: bool
) -> tuple[Tensor | None, Tensor | None]:
    return 2 * (state - numbers.k) * numbers.temperature * grad if need_x else None, grad.clone() if need_bias else None


OPERATOR = Operator("test_square", forward, forward)
BACKWARD = Operator("test_square_backward", backward, backward)
square = differentiable(OPERATOR, ("y", "state"), ("x", "bias"), BACKWARD, where="square")
NUMBERS = Numbers(3, 0.5)


def test_the_schema_follows_from_annotations():
    assert str(OPERATOR.dispatched.default._schema) == (
        "pylate_fastmaxsim::test_square(Tensor x, int k, float temperature, SymInt length, Tensor? bias, "
        "bool want_state=True) -> (Tensor, Tensor)"
    )


def eager(x, bias):
    return square(x, NUMBERS, 2, bias, True)[0]


def dispatched(x, bias):
    return OPERATOR.dispatched(x, *NUMBERS, 2, bias, True)[0]


@pytest.mark.parametrize("function", [eager, dispatched, torch.compile(eager, backend="aot_eager", fullgraph=True)])
def test_gradients_are_those_of_the_backward_however_it_is_called(function):
    x, bias = (torch.tensor(values, dtype=torch.float64, requires_grad=True) for values in ([1.0, 2.0], [3.0, 4.0]))
    y = function(x, bias)
    assert y.tolist() == [3.5, 6.0]
    assert [each.tolist() for each in torch.autograd.grad(y.sum(), (x, bias))] == [[1.0, 2.0], [1.0, 1.0]]
    assert torch.autograd.grad(function(x, None).sum(), x)[0].tolist() == [1.0, 2.0]
    assert torch.autograd.grad(function(x.detach(), bias).sum(), bias)[0].tolist() == [1.0, 1.0]
