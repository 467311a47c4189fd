"""Errors for the numbers in tensors: shared rows, and candidates out of range."""

import pytest
import torch

from pylate_fastmaxsim import maxsim, xtr_scores
from tests.support.ragged_batches import batches

Q, D = torch.zeros(2, 3, 4), torch.zeros(5, 6, 4)


@pytest.mark.parametrize("function", [maxsim, lambda *inputs: xtr_scores(*inputs[:2], 3, *inputs[2:])])
def test_sequences_that_share_rows_are_refused_where_gradients_are_wanted(function):
    queries, documents = batches(queries=(3, 2), documents=(4, 0, 3), masked=False)
    queries, documents = queries.select(torch.tensor([0, 0, 1])), documents.select(torch.tensor([0, 1, 2, 1, 1]))
    twice = documents.select(torch.tensor([0, 2, 0]))
    learned, learned_twice = (each.with_values(each.values.clone().requires_grad_()) for each in (documents, twice))
    function(queries, twice)
    with torch.no_grad():
        function(queries, learned_twice)
    with pytest.raises(ValueError, match="queries must not share rows of values"):
        function(queries, learned)
    queries = queries.select(torch.tensor([0, 2]))
    # A document without a token is in nobody's way.
    function(queries, learned).sum().backward()
    function(queries.with_values(queries.values.clone().requires_grad_()), twice).sum().backward()
    with pytest.raises(ValueError, match="documents must not share rows of values"):
        function(queries, learned_twice)


class _Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize("name", ["maxsim", "xtr_scores"])
@pytest.mark.parametrize("out_of_range", [-1, 5])
def test_candidates_out_of_range_are_refused_wherever_they_are_used(name, out_of_range):
    def function(queries, documents, candidates):
        if name == "maxsim":
            return maxsim(queries, documents, candidates)
        return xtr_scores(queries, documents, 3, candidates)

    candidates = torch.tensor([[0], [out_of_range]])
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for call, *inputs in (
        (function, Q, D, candidates),
        (compiled, Q, D, candidates),
        (function, Q, D, candidates.as_subclass(_Subclass)),
        (function, Q.clone().requires_grad_(), D, candidates),
        (function, Q[:, :0], D[:, :0], candidates),  # nothing to score
    ):
        with pytest.raises(ValueError, match=f"^{name}: candidates must be from 0 to Nd - 1 = 4, got "):
            call(*inputs)


def test_candidates_are_checked_once(monkeypatch):
    checked, original = [], torch.aminmax
    monkeypatch.setattr(torch, "aminmax", lambda tensor: checked.append(tensor) or original(tensor))
    queries = torch.randn(2, 3, 4, requires_grad=True)
    candidates = torch.tensor([[0], [4]])
    maxsim(queries, D, candidates).sum().backward()
    xtr_scores(queries, D, 3, candidates).sum().backward()
    assert [each.data_ptr() for each in checked].count(candidates.data_ptr()) == 2
