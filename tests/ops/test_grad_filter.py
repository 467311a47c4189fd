"""Gradient filtering drops what the bound allows and nothing else, and training does not notice."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import collated, load_model, sentences
from pylate import losses

import pylate_fastmaxsim
from pylate_fastmaxsim import maxsim, maxsim_from_hidden, xtr_scores
from pylate_fastmaxsim.ops import grad_filter

BF16_ROUNDING = 2.0**-9


def filtered(gradient):
    scores = torch.zeros_like(gradient, requires_grad=True)
    grad_filter.filtered(scores).backward(gradient)
    return scores.grad


@given(
    rows=st.integers(1, 5),
    pairs=st.integers(1, 200),
    temperature=st.sampled_from([0.1, 1.0, 5.0]),
    seed=st.integers(0, 9),
)
def test_what_is_dropped_of_a_query_is_at_most_the_bound(rows, pairs, temperature, seed):
    generator = torch.Generator().manual_seed(seed)
    gradient = torch.randn(rows, pairs, generator=generator).mul(10 * temperature).exp() * torch.randn(
        rows, pairs, generator=generator
    )
    kept = filtered(gradient)
    dropped = torch.where(kept == 0, gradient, 0.0)
    assert torch.equal(kept + dropped, gradient)
    assert (dropped.abs().sum(dim=1) <= 2.0**-12 * gradient.abs().sum(dim=1)).all()


def test_the_rest_of_a_softmax_is_dropped():
    scores = torch.zeros(4, 512)
    scores[:, 0] = 1.0
    gradient = torch.softmax(scores / 0.02, dim=1)
    assert (filtered(gradient) != 0).sum(dim=1).tolist() == [1] * 4


@pytest.mark.parametrize(
    "row", [[torch.inf, 1.0, -2.0], [3e38, 2e38, 1.0], [0.0, -torch.inf, 0.0], [torch.nan, 1e-9, 0.0]]
)
def test_what_is_not_finite_passes_and_so_does_what_stands_beside_it(row):
    # A GradScaler that is not told of an overflow never lowers its scale.
    gradient = torch.tensor([row, [1.0, 1e-9, 0.5]])
    kept = filtered(gradient)
    torch.testing.assert_close(kept[0], gradient[0], rtol=0, atol=0, equal_nan=True)
    assert kept[1].tolist() == [1.0, 0.0, 0.5]


@pytest.mark.parametrize("candidates", [None, torch.tensor([[0, 5, 2], [1, 1, 3]])], ids=["all", "candidates"])
def test_the_operator_differentiates_the_pairs_that_are_left(candidates):
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(2, 5, 16, generator=generator, requires_grad=True)
    documents = torch.randn(6, 9, 16, generator=generator, requires_grad=True)
    scores = maxsim(queries, documents, candidates, grad_filter="auto")
    plain = maxsim(queries, documents, candidates)
    assert torch.equal(scores, plain)
    weight = torch.full_like(plain, 1e-7)
    weight[:, 0] = 1.0
    ours = torch.autograd.grad(scores, (queries, documents), weight)
    expected = torch.autograd.grad(plain, (queries, documents), torch.where(weight == 1.0, 1.0, 0.0))
    assert all(map(torch.equal, ours, expected))


@pytest.mark.parametrize(
    "operator",
    [maxsim, lambda q, d, **options: xtr_scores(q, d, 3, **options)],
    ids=["maxsim", "xtr_scores"],
)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_scores_can_be_changed_in_place(operator, compiled):
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(3, 4, 5, generator=generator, requires_grad=True)
    documents = torch.randn(6, 4, 5, generator=generator)

    def changed(queries, **options):
        scores = operator(queries, documents, **options)
        scores /= 0.05
        return scores.masked_fill_(torch.eye(3, 6, dtype=torch.bool), -1.0)

    def gradients(function, **options):
        scores = function(queries, **options)
        return scores.detach(), *torch.autograd.grad(scores.logsumexp(1).sum(), queries)

    compare = torch.compile(changed, fullgraph=True, backend="aot_eager") if compiled else changed
    scores, gradient = gradients(compare, grad_filter="auto")
    plain, expected = gradients(changed)
    torch.testing.assert_close(scores, plain)
    torch.testing.assert_close(gradient, expected, rtol=1e-2, atol=1e-2)
    assert not torch.equal(gradient, expected), "something is dropped"


def test_other_values_are_refused():
    vectors, weight = torch.ones(1, 1, 1), torch.ones(1, 1)
    calls = {
        "maxsim": lambda: maxsim(vectors, vectors, grad_filter="all"),
        "xtr_scores": lambda: xtr_scores(vectors, vectors, 1, grad_filter="all"),
        "maxsim_from_hidden": lambda: maxsim_from_hidden(vectors, vectors, weight, grad_filter="all"),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=f"^{name}: grad_filter must be \"auto\" or None, got 'all'.$"):
            call()
    with pytest.raises(ValueError, match='^grad_filter must be "auto" or None, got True.$'):
        pylate_fastmaxsim.enable(grad_filter=True)


@pytest.mark.parametrize("loss_class", [losses.Contrastive, losses.CachedContrastive])
def test_gradients_of_training_move_by_less_than_bf16_rounds(encoder, loss_class, monkeypatch):
    model = load_model(encoder("modernbert"), document_length=32)
    batch = collated(model, *(sentences(24, longest=24, seed=seed) for seed in range(3)))
    kept = []
    original = grad_filter._Filter.backward

    def counting(ctx, gradient):
        result = original(ctx, gradient)
        kept.append((result != 0).float().mean().item())
        return result

    monkeypatch.setattr(grad_filter._Filter, "backward", counting)

    def gradients(**options):
        model.zero_grad()
        with pylate_fastmaxsim.enabled(**options):
            loss = loss_class(model, temperature=0.002)([dict(column) for column in batch], None)
            loss.backward()
        return loss.detach(), torch.cat([weight.grad.flatten() for weight in model.parameters()])

    plain_loss, plain = gradients()
    assert not kept
    loss, ours = gradients(grad_filter="auto")
    assert torch.equal(loss, plain_loss)
    assert max(kept) < 0.9
    assert ((ours - plain).norm() / plain.norm()).item() < BF16_ROUNDING
