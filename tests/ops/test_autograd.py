"""torch.vmap, torch.func and forward-mode derivatives are refused, whose results would be wrong or slow."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

from pylate_fastmaxsim import maxsim, maxsim_from_hidden, splade_pool, xtr_scores
from pylate_fastmaxsim.ops.projection import project_normalize

DOCUMENTS = torch.randn(5, 6, 4)
WEIGHT = torch.randn(4, 4)
OPERATORS = {
    "maxsim": lambda x: maxsim(x, DOCUMENTS),
    "maxsim of documents": lambda x: maxsim(DOCUMENTS, x),
    "xtr_scores": lambda x: xtr_scores(x, DOCUMENTS, k=3),
    "project_normalize": lambda x: project_normalize(x, WEIGHT),
    "maxsim_from_hidden": lambda x: maxsim_from_hidden(DOCUMENTS, x, WEIGHT),
    "splade_pool": lambda x: splade_pool(x, WEIGHT),
}


def _dual(f, x):
    with forward_ad.dual_level():
        f(forward_ad.make_dual(x, torch.ones_like(x)))


TRANSFORMS = {
    "dual numbers": _dual,
    "vmap": lambda f, x: torch.vmap(f)(x[None]),
    "grad": lambda f, x: torch.func.grad(lambda y: f(y).sum())(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),)),
    "compiled vmap": lambda f, x: torch.compile(torch.vmap(f), backend="eager")(x[None]),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("function", OPERATORS.values(), ids=OPERATORS)
def test_transforms_are_refused(function, transform):
    with pytest.raises(NotImplementedError, match="not supported"):
        transform(function, torch.randn(2, 3, 4))
    torch._dynamo.reset()
