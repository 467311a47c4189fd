"""Gradients through torch.vmap, batches of gradients and exported programs are those of plain calls, or refused."""

from __future__ import annotations

import pytest
import torch

from pylate_fastmaxsim import maxsim, xtr_scores
from pylate_fastmaxsim.ops import maxsim as ops

OPERATORS = {
    "maxsim": maxsim,
    "maxsim filtered": lambda q, d: maxsim(q, d, grad_filter="auto"),
    "xtr_scores": lambda q, d: xtr_scores(q, d, k=4),
    "xtr_scores filtered": lambda q, d: xtr_scores(q, d, k=4, grad_filter="auto"),
}
over_operators = pytest.mark.parametrize("function", OPERATORS.values(), ids=OPERATORS)


def vectors(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, 5, generator=torch.Generator().manual_seed(seed), requires_grad=True)


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
        torch.testing.assert_close(scores, wanted)
        gradients = [torch.autograd.grad(each.square().sum(), leaves) for each in (scores, wanted)]
        torch.testing.assert_close(*gradients)
        assert all(gradient.any() for gradient in gradients[0])

    check(lambda: torch.vmap(function)(*inputs), lambda: loop(function, *inputs), inputs)

    def of_shared(documents):
        return function(shared, documents)

    check(lambda: torch.vmap(of_shared)(inputs[1]), lambda: loop(of_shared, inputs[1]), (shared, inputs[1]))


@over_operators
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


@pytest.mark.parametrize("name", ["maxsim", "xtr_scores"])
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_has_gradients_or_says_that_it_has_none(name, strict):
    module = _Module(OPERATORS[name])
    queries, documents = vectors(3, 4), vectors(4, 6, seed=1)
    plain = torch.export.export(module, (queries.detach(), documents.detach()), strict=strict).module()
    scores = plain(queries, documents)
    torch.testing.assert_close(scores, module(queries, documents))
    with pytest.raises(RuntimeError, match=f"^{name}: these scores pass no gradient, .* require a gradient.$"):
        scores.sum().backward()
    learning = torch.export.export(module, (vectors(3, 4, seed=2), vectors(4, 6, seed=3)), strict=strict).module()
    gradients = [
        torch.autograd.grad(each(queries, documents).square().sum(), (queries, documents))
        for each in (learning, module)
    ]
    torch.testing.assert_close(*gradients)
