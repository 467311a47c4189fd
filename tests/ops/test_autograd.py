"""Forward-mode derivatives are refused, which would be zero otherwise, and so are the gradients of torch.func."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

from pylate_fastmaxsim import maxsim, maxsim_from_hidden, xtr_scores
from pylate_fastmaxsim.ops.projection import project_normalize

DOCUMENTS = torch.randn(5, 6, 4)
WEIGHT = torch.randn(4, 4)
OPERATORS = {
    "maxsim": lambda x: maxsim(x, DOCUMENTS),
    "maxsim of documents": lambda x: maxsim(DOCUMENTS, x),
    "xtr_scores": lambda x: xtr_scores(x, DOCUMENTS, k=3),
    "project_normalize": lambda x: project_normalize(x, WEIGHT),
    "maxsim_from_hidden": lambda x: maxsim_from_hidden(DOCUMENTS, x, WEIGHT),
}


@pytest.mark.parametrize("function", OPERATORS.values(), ids=OPERATORS)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_tangents_are_refused(function, requires_grad):
    vectors = torch.randn(2, 3, 4)
    with pytest.raises(NotImplementedError, match="forward-mode derivatives .* are not supported; use reverse mode"):
        torch.func.jvp(function, (vectors,), (torch.ones_like(vectors),))
    vectors.requires_grad_(requires_grad)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        function(forward_ad.make_dual(vectors, torch.ones_like(vectors)))


@pytest.mark.parametrize("function", OPERATORS.values(), ids=OPERATORS)
def test_what_carries_no_tangent_goes_through(function):
    vectors = torch.randn(2, 3, 4)
    with forward_ad.dual_level():
        assert torch.equal(function(vectors), function(vectors))


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(lambda y: f(y).sum())(x),
    "vjp": torch.func.vjp,
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "grad of vmap": lambda f, x: torch.func.grad(lambda y: torch.vmap(f)(y).sum())(x[None]),
    "vmap of grad": lambda f, x: torch.vmap(torch.func.grad(lambda y: f(y).sum()))(x[None]),
}


@pytest.mark.parametrize("function", OPERATORS.values(), ids=OPERATORS)
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_gradients_of_torch_func_are_refused(function, transform):
    with pytest.raises(NotImplementedError, match="the gradients of torch.func .* not supported; use backward or"):
        transform(function, torch.randn(2, 3, 4))


@pytest.mark.parametrize("function", OPERATORS.values(), ids=OPERATORS)
def test_what_torch_func_takes_no_gradient_of_goes_through(function):
    vectors = torch.randn(2, 3, 4)
    expected = function(vectors).sum()
    assert torch.func.grad(lambda scale: (scale * function(vectors)).sum())(torch.ones(())) == expected

    def of_a_constant(x):
        with torch.no_grad():
            constant = function(x)
        return (x.sum() * constant).sum()

    torch.testing.assert_close(torch.func.grad(of_a_constant)(vectors), expected.expand_as(vectors))
