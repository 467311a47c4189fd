"""NaN and infinity in MaxSim: where they show, and where they may not."""

import pytest
import torch

from pylate_fastmaxsim import maxsim, reference
from pylate_fastmaxsim._operands import ScoringOperands
from pylate_fastmaxsim.cpu import maxsim as blocked
from tests.support import exactness
from tests.support.defined_winners import maxsim_winners
from tests.support.ragged_batches import CANDIDATES, batches


def test_nan_in_a_live_token_shows_and_elsewhere_does_not():
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(3, 4, 8, generator=generator)
    documents = torch.randn(5, 6, 8, generator=generator)
    queries_mask, documents_mask = torch.ones(3, 4), torch.ones(5, 6)
    queries_mask[0, 1] = documents_mask[0, 2] = 0
    queries[0, 1] = documents[0, 2] = torch.nan
    masks = {"queries_mask": queries_mask, "documents_mask": documents_mask}
    assert maxsim(queries, documents, **masks).isfinite().all()
    documents[3, 4, 0] = torch.nan
    expected = torch.zeros(3, 5, dtype=torch.bool)
    expected[:, 3] = True
    for zero_floor in (None, torch.ones(5, dtype=torch.bool)):
        assert torch.equal(maxsim(queries, documents, **masks, zero_floor=zero_floor).isnan(), expected)
    queries[2, 0, 0] = torch.nan
    expected[2] = True
    assert torch.equal(maxsim(queries, documents, **masks).isnan(), expected)


@pytest.mark.parametrize("candidates", [None, torch.tensor([[0, 1], [1, 2]])], ids=["all", "candidates"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_pair_of_gradient_zero_adds_nothing_that_is_not_finite(candidates, bad):
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(2, 4, 8, generator=generator)
    documents = torch.randn(3, 6, 8, generator=generator)
    shape = (2, 3 if candidates is None else 2)
    for side, named in ((0, torch.ones(shape)), (1, torch.ones(shape))):
        inputs = [queries.clone(), documents.clone()]
        inputs[side][1] = bad
        # Of all pairs that the bad query or document is in, the gradient is 0.
        columns = torch.arange(3).expand(2, 3) if candidates is None else candidates
        named[1 if side == 0 else columns == 1] = 0
        leaves = [each.requires_grad_() for each in inputs]
        gradients = torch.autograd.grad(maxsim(*leaves, candidates), leaves, named)
        assert all(gradient.isfinite().all() for gradient in gradients)
        assert gradients[1 - side].any() and not gradients[side][1].any()
        # NaN is not 0, and a GradScaler has to see it.
        gradients = torch.autograd.grad(maxsim(*leaves, candidates), leaves, named * torch.nan)
        assert all(gradient.isnan().any() for gradient in gradients)


@pytest.mark.parametrize("layout", ["all", "candidates"])
@pytest.mark.parametrize("floor", [False, True])
@pytest.mark.parametrize("few", [0, blocked.FEW_ELEMENTS], ids=["one by one", "many at once"])
def test_what_is_not_finite_wins_as_in_the_definition(layout, floor, few, monkeypatch):
    """The first NaN of a document, and -infinity where there is nothing better; masked tokens never."""
    monkeypatch.setattr(blocked, "FEW_ELEMENTS", few)
    generator = torch.Generator().manual_seed(0)
    numbers = torch.tensor([torch.nan, torch.inf, -torch.inf, -torch.inf, -1.0, 1.0, 2.0])
    for _ in range(20):
        queries, documents = batches(torch.float64, dim=1, documents=(7, 0, 2, 3, 9, 1))
        some = torch.randint(2, len(numbers), documents.values.shape, generator=generator)
        some[torch.rand(some.shape, generator=generator) < 0.1] -= 2
        documents = documents.with_values(numbers.double()[some])
        queries = queries.with_values(queries.values.sign())
        candidates = CANDIDATES if layout == "candidates" else None
        zero_floor = torch.rand(6, generator=generator) < 0.5 if floor else None
        operands = ScoringOperands.of(queries, documents, candidates, zero_floor)
        scores, winners = blocked.forward(operands, True, "highest")
        assert torch.equal(exactness.winner_index(winners), maxsim_winners(queries, documents, candidates, zero_floor))
        torch.testing.assert_close(scores, reference.maxsim(queries, documents, candidates, zero_floor), equal_nan=True)
