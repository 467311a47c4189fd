"""Forward-mode derivatives are refused; they would be zero otherwise."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

from pylate_fastmaxsim import maxsim, maxsim_from_hidden, xtr_scores
from pylate_fastmaxsim.ops.head import project_normalize

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
