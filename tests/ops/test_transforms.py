"""Gradients through torch.vmap, batches of gradients and exported programs are those of plain calls, or refused."""

from __future__ import annotations

import pytest
import torch

from pylate_fastmaxsim import TokenBatch, maxsim, maxsim_from_hidden, xtr_scores
from pylate_fastmaxsim.ops import maxsim as ops

WEIGHT = torch.randn(5, 5, generator=torch.Generator().manual_seed(4), dtype=torch.float64, requires_grad=True)
OF_VECTORS = {
    "maxsim": maxsim,
    "maxsim filtered": lambda q, d: maxsim(q, d, grad_filter="auto"),
    "xtr_scores": lambda q, d: xtr_scores(q, d, k=4),
    "xtr_scores filtered": lambda q, d: xtr_scores(q, d, k=4, grad_filter="auto"),
}
OPERATORS = {
    **OF_VECTORS,
    "maxsim_from_hidden": lambda q, d: maxsim_from_hidden(q, d, WEIGHT, project="both"),
}
over_operators = pytest.mark.parametrize("function", OPERATORS.values(), ids=OPERATORS)


def vectors(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, 5, generator=generator, dtype=torch.float64, requires_grad=True)


def assert_same_gradients(scores, wanted, leaves):
    """And the same scores; the weight is a leaf of those that are of hidden states."""
    torch.testing.assert_close(scores, wanted)
    leaves = *leaves, WEIGHT
    gradients = [torch.autograd.grad(each.square().sum(), leaves, allow_unused=True) for each in (scores, wanted)]
    torch.testing.assert_close(*gradients)
    assert all(gradient is None or gradient.any() for gradient in gradients[0])


def loop(function, *batches):
    return torch.stack([function(*each) for each in zip(*batches, strict=True)])


@over_operators
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_vmap_has_the_gradients_of_a_loop(function, compiled):
    inputs = vectors(2, 3, 4), vectors(2, 4, 6, seed=1)
    shared = vectors(3, 4, seed=2)

    def check(mapped, expected, leaves):
        mapped = torch.compile(mapped, backend="aot_eager", fullgraph=True) if compiled else mapped
        scores, wanted = mapped(), expected()
        assert_same_gradients(scores, wanted, leaves)

    check(lambda: torch.vmap(function)(*inputs), lambda: loop(function, *inputs), inputs)

    def of_shared(documents):
        return function(shared, documents)

    check(lambda: torch.vmap(of_shared)(inputs[1]), lambda: loop(of_shared, inputs[1]), (shared, inputs[1]))
    # Nothing that is mapped has a part in the scores.
    documents = vectors(4, 6, seed=3)

    def scaled(factor):
        return factor * function(shared, documents)

    factors = torch.tensor([2.0, 3.0])
    check(lambda: torch.vmap(scaled)(factors), lambda: loop(scaled, factors), (shared, documents))


LAYOUTS = {
    "mask": (TokenBatch.from_padded, torch.rand(2, 4, 6, generator=torch.Generator().manual_seed(5)) < 0.6),
    "select": (lambda d, index: TokenBatch.from_padded(d).select(index), torch.tensor([[0, 2, 1], [3, 1, 2]])),
    "packed": (
        lambda d, bounds: TokenBatch.from_packed(d.flatten(0, 1), bounds, max_length=12),
        torch.tensor([[0, 3, 9, 20], [0, 12, 12, 24]]),
    ),
}


@over_operators
@pytest.mark.parametrize("make, mapped", LAYOUTS.values(), ids=LAYOUTS)
def test_where_documents_are_may_be_mapped(function, make, mapped):
    queries, documents = vectors(2, 3, 4), vectors(2, 4, 6, seed=1)

    def of_each(q, d, places):
        return function(q, make(d, places))

    inputs = queries, documents, mapped
    assert_same_gradients(torch.vmap(of_each)(*inputs), loop(of_each, *inputs), (queries, documents))

    def of_shared(places):
        return of_each(queries[0], documents[0], places)

    assert_same_gradients(torch.vmap(of_shared)(mapped), loop(of_shared, mapped), (queries, documents))


@pytest.mark.parametrize("function", OF_VECTORS.values(), ids=OF_VECTORS)
def test_winners_are_kept_in_a_transform_only(function, monkeypatch):
    def no_gradient(*inputs):
        with torch.no_grad():
            return function(*inputs)

    asked = []
    recording = ops.recording
    monkeypatch.setattr(ops, "recording", lambda *arguments: asked.append(recording(*arguments)) or asked[-1])
    q, d = vectors(3, 4).detach(), vectors(4, 6).detach()
    function(q, d)
    torch.vmap(function)(q[None], d[None])
    torch.vmap(no_gradient)(q[None], d[None])
    assert asked == [(False, False), (True, False), (False, False)]


@over_operators
def test_a_batch_of_gradients(function):
    queries, documents = vectors(3, 4), vectors(4, 6, seed=1)

    def jacobian(vectorize):
        return torch.autograd.functional.jacobian(function, (queries, documents), vectorize=vectorize)

    torch.testing.assert_close(jacobian(True), jacobian(False))


class _Module(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, queries, documents):
        return self.function(queries, documents)


@pytest.mark.parametrize("name", OF_VECTORS)
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_has_gradients_or_says_that_it_has_none(name, strict):
    module = _Module(OPERATORS[name])
    queries, documents = vectors(3, 4), vectors(4, 6, seed=1)
    plain = torch.export.export(module, (queries.detach(), documents.detach()), strict=strict).module()
    scores = plain(queries, documents)
    torch.testing.assert_close(scores, module(queries, documents))
    with pytest.raises(
        RuntimeError, match=f"^{name.split()[0]}: these scores pass no gradient, .* require a gradient.$"
    ):
        scores.sum().backward()
    learning = torch.export.export(module, (vectors(3, 4, seed=2), vectors(4, 6, seed=3)), strict=strict).module()
    gradients = [
        torch.autograd.grad(each(queries, documents).square().sum(), (queries, documents))
        for each in (learning, module)
    ]
    torch.testing.assert_close(*gradients)
