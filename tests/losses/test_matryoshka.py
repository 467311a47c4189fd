"""Matryoshka: the sum of a loss over fewer dimensions and tokens, with and without the flag."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pylate_fastmaxsim
from pylate_fastmaxsim import TokenBatch, reference
from pylate_fastmaxsim.losses import ContrastiveDistillation, Matryoshka, PooledContrastive
from pylate_fastmaxsim.losses.views import pooled_tokens
from tests.support.compared import assert_equal, found, run
from tests.support.loss_hosts import COUNT, HOST, LABELS, OPTIONS, VIEWS, WAYS, batch_of

# Means of neighbours, and of Ward's clusters.
POOLED = [{"pooled": True}, {"pool_factors": (1, 2.5), "pool_weights": (1.0, 0.5)}]


@pytest.fixture
def model(encoder):
    # ModernBERT rotates in float32, so that gradients of a sum are no sums of gradients.
    return HOST.load(encoder("bert"))


def assert_with_and_without(loss: nn.Module, batch: list[dict], expected: tuple | None = None) -> None:
    plain = run(loss, batch, LABELS)
    if expected is not None:
        assert_equal(plain, expected, HOST.tolerance)
    for options in ({"padding_free": False}, {}):
        with pylate_fastmaxsim.enabled(**HOST.exactly, **options):
            assert_equal(run(loss, batch, LABELS), plain, HOST.tolerance)


@pytest.mark.parametrize("name", HOST.losses)
def test_it_is_the_sum_over_models_that_are_cut(model, mode, name):
    batch = HOST.batch_for(name, model)
    stock = run(HOST.over_cut_models(HOST.loss(name, model)), batch, LABELS)
    assert_with_and_without(Matryoshka(model, HOST.loss(name, model), **VIEWS), batch, stock)


@pytest.mark.parametrize("more", POOLED)
@pytest.mark.parametrize("name", HOST.losses)
def test_of_pooled_tokens(model, packed, name, more):
    loss, batch = Matryoshka(model, HOST.loss(name, model), **VIEWS, **more), HOST.batch_for(name, model)
    if "pooled" in more or HOST.unit_means:
        assert_with_and_without(loss, batch)
        return
    with pytest.raises(ValueError, match=f"{type(loss.loss).__name__} of PyLate itself makes means unit vectors"):
        run(loss, batch, LABELS)
    with pylate_fastmaxsim.enabled(**HOST.exactly, padding_free=False):
        padded = run(loss, batch, LABELS)
    with pylate_fastmaxsim.enabled(**HOST.exactly):
        assert_equal(run(loss, batch, LABELS), padded)


@pytest.mark.parametrize("size", [{}, {"mini_batch_size": 3}, {"mini_batch_tokens": 100}], ids=str)
def test_pooled_contrastive_is_the_reference(model, mode, size):
    factors, weights, total = (1, 2.5, 4), (1.0, 0.5, 2.0), 0.0
    queries, documents = pylate_fastmaxsim.encode(model, batch_of(model))
    for factor, weight in zip(factors, weights, strict=True):
        means = reference.pool_tokens(documents, factor, protected=1, normalize=HOST.unit_means)
        scores = reference.maxsim(queries, TokenBatch.from_list(means))
        total = total + weight * F.cross_entropy(scores / 0.5, torch.arange(COUNT) * WAYS)
    model.zero_grad()
    total.backward()
    expected = found(model, total)
    loss = PooledContrastive(model, factors, weights, temperature=0.5, **size)
    for options in (None, {"padding_free": False}, {}):
        if options is not None:
            pylate_fastmaxsim.enable(**options)
        assert_equal(run(loss, batch_of(model)), expected)


@pytest.mark.parametrize("count", [1, 3, 7, 20])
def test_pooled_tokens_are_means_of_runs(count):
    """Of documents in another order than they are stored in, with gaps, and with tokens of NaN that do not count."""
    torch.manual_seed(0)
    values, mask = torch.randn(5, 7, 4, dtype=torch.float64), torch.rand(5, 7) < 0.6
    mask[1], mask[3] = True, False
    values[~mask] = torch.nan
    order = torch.tensor([4, 0, 3, 1, 2])
    found = pooled_tokens(TokenBatch.from_padded(values.requires_grad_(), mask).select(order), count)
    for document, padded, live in zip(order.tolist(), *found.to_padded(), strict=True):
        tokens = values[document][mask[document]]
        size = max(len(tokens), count)
        # Run r begins where the place times the number of runs reaches r times the number of tokens.
        runs = torch.tensor([place * count // size if len(tokens) > count else place for place in range(len(tokens))])
        means = [tokens[runs == run].mean(0) for run in sorted({*runs.tolist()})]
        torch.testing.assert_close(padded[live], F.normalize(torch.stack(means), dim=-1) if means else tokens)
    assert found.lengths.tolist() == [min(count, int(mask[document].sum())) for document in order]
    found.values.sum().backward()
    assert values.grad.isfinite().all()


@pytest.mark.parametrize("more", [{}, *POOLED])
def test_gradcache_gives_the_gradients_of_the_whole_batch(model, mode, more):
    loss, whole = (Matryoshka(model, each, **VIEWS, **more) for each in HOST.with_gradcache(model))
    with pylate_fastmaxsim.enabled(**HOST.exactly, padding_free=False):
        whole = run(whole, batch_of(model))
    assert_equal(run(loss, batch_of(model)), whole, max(HOST.tolerance, 1e-7))
    assert_with_and_without(loss, batch_of(model))
    with torch.no_grad():
        torch.testing.assert_close(loss(batch_of(model)), whole[0])
    assert "calculate_loss" not in vars(loss.loss)


@pytest.mark.parametrize("size", [{}, {"mini_batch_size": 3}, {"mini_batch_tokens": 100}], ids=str)
@pytest.mark.parametrize("more", [{}, *POOLED])
def test_contrastive_and_distillation_inside(model, packed, size, more):
    whole, loss = (ContrastiveDistillation(model, **OPTIONS, **each) for each in ({}, size))
    whole, loss = (Matryoshka(model, each, **VIEWS, **more) for each in (whole, loss))
    whole = run(whole, batch_of(model), LABELS)
    for options in ({"padding_free": False}, {}):
        with pylate_fastmaxsim.enabled(**options):
            assert_equal(run(loss, batch_of(model), LABELS), whole)


class OfOnesOwn(ContrastiveDistillation):
    def forward(self, sentence_features, labels=None):
        return 2 * super().forward(sentence_features, labels)


class Around(nn.Module):
    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.model, self.inner = loss.model, loss

    def forward(self, sentence_features, labels=None):
        return 2 * self.inner(sentence_features, labels)


def nested(model):
    inner = Matryoshka(model, ContrastiveDistillation(model), VIEWS["dims"], VIEWS["weights"])
    return Matryoshka(model, inner, document_tokens=VIEWS["document_tokens"], token_weights=VIEWS["token_weights"])


# Losses that Matryoshka does not know, and how many times the known one they are.
UNKNOWN = {
    "subclass": (lambda model: Matryoshka(model, OfOnesOwn(model), **VIEWS), 2),
    "around": (lambda model: Matryoshka(model, Around(ContrastiveDistillation(model)), **VIEWS), 2),
    "another Matryoshka": (nested, 1),
}


@pytest.mark.parametrize("make, factor", UNKNOWN.values(), ids=UNKNOWN.keys())
def test_a_loss_of_ones_own(model, packed, make, factor):
    loss, gradients = run(Matryoshka(model, ContrastiveDistillation(model), **VIEWS), batch_of(model), LABELS)
    expected = factor * loss, {name: factor * gradient for name, gradient in gradients.items()}
    for options in (None, {"padding_free": False}, {}):
        if options is not None:
            pylate_fastmaxsim.enable(**options)
        assert_equal(run(make(model), batch_of(model), LABELS), expected, 1e-7)


class Asking(nn.Module):
    def __init__(self, model: nn.Module, ask) -> None:
        super().__init__()
        self.model, self.ask = model, ask

    def forward(self, sentence_features, labels=None):
        return self.ask(self.model, sentence_features)


def rows_of(model, columns):
    keys = {"input_ids", "attention_mask", "token_type_ids"}
    rows = {key: value[:1] for key, value in columns[0].items() if key in keys}
    return model(rows)["token_embeddings"].sum()


GRADCACHE = "GradCache inside of it"
REFUSED = {
    "cached inside": (lambda model: Around(HOST.with_gradcache(model)[0]), GRADCACHE),
    "cached inside of another": (lambda model: Matryoshka(model, HOST.with_gradcache(model)[0], (16,)), GRADCACHE),
    "cached subclass": (lambda model: OfOnesOwn(model, mini_batch_size=3), GRADCACHE),
    "cached, of ours": (lambda m: Matryoshka(m, ContrastiveDistillation(m, mini_batch_size=3), (16,)), GRADCACHE),
    "rows": (lambda model: Asking(model, rows_of), "must call its model once"),
    "other model": (lambda m: Asking(m, lambda _, it: HOST.loss("contrastive", m)(it)), "does not call self.model"),
}


@pytest.mark.parametrize("on", [False, True])
@pytest.mark.parametrize("make, sentence", REFUSED.values(), ids=REFUSED.keys())
def test_losses_that_cannot_be_cut_are_refused(model, packed, on, make, sentence):
    loss = make(model)
    if on:
        pylate_fastmaxsim.enable()
    with pytest.raises(ValueError, match=sentence):
        run(Matryoshka(model, loss, document_tokens=(None, 3)), batch_of(model), LABELS)


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({}, "give dims, document_tokens or pool_factors"),
        ({"dims": (16, 8), "weights": (1.0,)}, "give one weight for each of dims, got 1 for 2"),
        ({"pool_factors": (1, 0.5)}, "each of pool_factors must be at least 1 and finite, got 0.5"),
        ({"document_tokens": (0,)}, "each of document_tokens must be at least 1, got 0"),
        ({"loss": nn.MSELoss(), "dims": (16,)}, "MSELoss has no self.model"),
        ({"dims": (999,)}, r"at most the \d+ dimensions of the model's embeddings, got 999"),
    ],
)
@pytest.mark.parametrize("on", [False, True])
def test_what_cannot_be_is_said_in_a_sentence(model, options, sentence, on):
    if on:
        pylate_fastmaxsim.enable()
    with pytest.raises(ValueError, match=sentence):
        Matryoshka(**{"model": model, "loss": HOST.loss("contrastive", model)} | options)(batch_of(model))
