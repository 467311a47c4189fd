"""Matryoshka of a ColBERT: the sum of stock's losses of fewer dimensions and tokens, with and without the flag."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from pylate import losses
from pylate.losses.contrastive import extract_skiplist_mask
from torch import nn

import pylate_fastmaxsim
from pylate_fastmaxsim import PooledScores
from pylate_fastmaxsim.losses import ContrastiveDistillation, Matryoshka
from tests.support.compared import assert_equal, batch_for, batch_of, run
from tests.support.encoded import calls_of
from tests.support.models import load_model, looking

VIEWS = {"dims": (16, 6), "weights": (1.0, 0.5), "document_tokens": (None, 3), "token_weights": (2.0, 1.0)}
LOSSES = [
    losses.Contrastive,
    partial(losses.CachedContrastive, mini_batch_size=3),
    partial(losses.Distillation, normalize_scores=False),
]


class Sum(nn.Module):
    """The same by stock alone: each view is encoded anew, by a model that cuts what it returns."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.model, self.loss = loss.model, loss

    def forward(self, sentence_features, labels):
        total = 0.0
        for dim, weight in ((16, 1.0), (6, 0.5)):
            for tokens, of_tokens in ((None, 2.0), (3, 1.0)):

                def cut(model, args, output, dim=dim, tokens=tokens):
                    is_query = args[0]["input_ids"].shape[1] == model.query_length
                    if tokens is not None and not is_query:
                        _, live = extract_skiplist_mask([args[0], args[0]], model.skiplist)
                        args[0]["attention_mask"] = (live & (live.cumsum(1) <= tokens)).long()
                    return {**output, "token_embeddings": output["token_embeddings"][..., :dim]}

                hook = self.model.register_forward_hook(cut)
                loss = self.loss([dict(column) for column in sentence_features], labels)
                hook.remove()
                total = total + weight * of_tokens * loss
        return total


@pytest.mark.parametrize("loss_class", [LOSSES[0], LOSSES[2]], ids=["contrastive", "distillation"])
def test_it_is_the_sum_over_models_that_are_cut(encoder, mode, loss_class):
    # ModernBERT rotates in float32, so that gradients of a sum are no sums of gradients.
    model = load_model(encoder("bert")).double()
    batch, labels = batch_for(loss_class.func if isinstance(loss_class, partial) else loss_class, model)
    stock = run(Sum(loss_class(model)), batch, labels)
    loss = Matryoshka(model, loss_class(model), **VIEWS)
    assert_equal(run(loss, batch, labels), stock)
    pylate_fastmaxsim.enable(stock_masking=True)
    assert_equal(run(loss, batch, labels), stock)


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("loss_class", LOSSES, ids=["contrastive", "cached", "distillation"])
def test_the_flag_changes_nothing(encoder, packed, loss_class, pooled, caplog):
    model = load_model(encoder("modernbert", local_attention=24)).double()
    batch, labels = batch_for(loss_class.func if isinstance(loss_class, partial) else loss_class, model)
    loss = Matryoshka(model, loss_class(model), **VIEWS, pooled=pooled)
    calls = []
    model[0].register_forward_pre_hook(looking(lambda _module, args: calls.append(args[0]["input_ids"].numel())))
    stock = run(loss, batch, labels)
    padded = sum(calls)
    pylate_fastmaxsim.enable(stock_masking=True)
    run(loss, batch, labels)
    calls.clear()
    assert_equal(run(loss, batch, labels), stock)
    assert sum(calls) < 0.8 * padded and "padded implementation" not in caplog.text


def test_gradcache_gives_the_gradients_of_the_whole_batch(model):
    batch = batch_of(model)
    whole = run(Matryoshka(model, losses.Contrastive(model, size_average=False), **VIEWS), batch)
    cached = losses.CachedContrastive(model, mini_batch_size=2, size_average=False)
    assert_equal(run(Matryoshka(model, cached, **VIEWS), batch), whole, 1e-7)
    with torch.no_grad():
        torch.testing.assert_close(Matryoshka(model, cached, **VIEWS)(batch), whole[0])
    assert "calculate_loss" not in vars(cached)


@pytest.mark.parametrize("size", [{}, {"mini_batch_tokens": 100}], ids=str)
@pytest.mark.parametrize("pooled", [False, True])
def test_contrastive_and_distillation_inside(model, packed, size, pooled):
    batch, labels = batch_of(model, columns=3), torch.rand(6, 3, dtype=torch.float64)
    loss = Matryoshka(model, ContrastiveDistillation(model, **size), **VIEWS, pooled=pooled)
    stock = run(loss, batch, labels)
    pylate_fastmaxsim.enable()
    assert_equal(run(loss, batch, labels), stock)


def test_one_encoding_of_each_text(model):
    batch = batch_of(model)
    assert len(calls_of(model, lambda: Matryoshka(model, losses.Contrastive(model), **VIEWS)(batch))) == 3


def test_a_loss_that_is_left_to_stock(model, caplog):
    batch = batch_of(model)
    metric = losses.Contrastive(model).score_metric
    loss = losses.Contrastive(model, score_metric=lambda *args, **kwargs: metric(*args, **kwargs))
    loss = Matryoshka(model, loss, **VIEWS)
    stock = run(loss, batch)
    pylate_fastmaxsim.enable(stock_masking=True)
    assert_equal(run(loss, batch), stock)
    assert "padded implementation" in caplog.text


class OfOnesOwn(losses.Contrastive):
    def forward(self, sentence_features, labels=None):
        return 2 * super().forward(sentence_features, labels)


class Around(nn.Module):
    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.model, self.loss = loss.model, loss

    def forward(self, sentence_features, labels=None):
        return 2 * self.loss(sentence_features, labels)


@pytest.mark.parametrize(
    "make", [OfOnesOwn, lambda model: Around(losses.Contrastive(model))], ids=["subclass", "around"]
)
def test_a_loss_of_ones_own(model, make):
    batch = batch_of(model)
    stock = run(Matryoshka(model, losses.Contrastive(model), **VIEWS), batch)
    twice = Matryoshka(model, make(model), **VIEWS)
    for enabled in (False, True):
        if enabled:
            pylate_fastmaxsim.enable(stock_masking=True)
        found = run(twice, batch)
        assert_equal((found[0] / 2, {name: gradient / 2 for name, gradient in found[1].items()}), stock, 1e-7)


def test_a_loss_that_cannot_be_cut_is_refused(model):
    batch, other = batch_of(model), losses.Contrastive(model)
    with pytest.raises(ValueError, match="Around cannot be cut, because it has GradCache inside of it"):
        Matryoshka(model, Around(losses.CachedContrastive(model, mini_batch_size=2)), (16,))(batch)
    own = Around(losses.Contrastive(model))
    own.forward = lambda columns, labels=None: own.model({key: value[:1] for key, value in columns[0].items()})
    with pytest.raises(ValueError, match="Around must call its model once for each column of texts"):
        Matryoshka(model, own, (16,))(batch)
    own = Around(losses.Contrastive(model))
    own.forward = lambda *args: other(*args)
    with pytest.raises(ValueError, match="Around does not call self.model"):
        Matryoshka(model, own, (16,))(batch)


@pytest.mark.parametrize("pooled", [False, True])
def test_tokens_that_are_left_out_of_full_documents_are_masked_ones(encoder, pooled):
    """In stock a document without padding has no similarity of 0, and one that was cut has."""
    model = load_model(encoder("bert"), document_length=6).double()
    loss = Matryoshka(model, losses.Contrastive(model), document_tokens=(2,), pooled=pooled)
    batch = batch_of(model)
    stock = run(loss, batch)
    pylate_fastmaxsim.enable(stock_masking=True)
    assert_equal(run(loss, batch), stock)


def test_any_score_metric_inside(model):
    batch = batch_of(model)
    loss = losses.Contrastive(model, score_metric=PooledScores(length_normalize=True))
    loss = Matryoshka(model, loss, dims=(16, 8))
    stock = run(loss, batch)
    pylate_fastmaxsim.enable()
    assert_equal(run(loss, batch), stock)


def test_what_cannot_be_is_said_in_a_sentence(model):
    loss = losses.Contrastive(model)
    with pytest.raises(ValueError, match="give dims, document_tokens or both"):
        Matryoshka(model, loss)
    with pytest.raises(ValueError, match="weights must be one number for each of dims, got 1 for 2"):
        Matryoshka(model, loss, (16, 8), (1.0,))
    with pytest.raises(ValueError, match="each of document_tokens must be at least 1, got 0"):
        Matryoshka(model, loss, document_tokens=(0,))
    with pytest.raises(ValueError, match="MSELoss has no self.model"):
        Matryoshka(model, nn.MSELoss(), (16,))
    for enabled in (False, True):
        if enabled:
            pylate_fastmaxsim.enable()
        with pytest.raises(ValueError, match="at most the 16 dimensions of the model's embeddings, got 32"):
            Matryoshka(model, loss, (32,))(batch_of(model))


@pytest.mark.parametrize("loss_class", [losses.Contrastive, ContrastiveDistillation])
def test_one_inside_of_another_sees_the_tokens_of_the_outer_one(model, loss_class):
    batch, labels = batch_of(model, columns=3), torch.rand(6, 3, dtype=torch.float64)
    loss, labels = loss_class(model), labels if loss_class is ContrastiveDistillation else None
    pylate_fastmaxsim.enable(stock_masking=True)
    inner = Matryoshka(model, loss, dims=VIEWS["dims"], weights=VIEWS["weights"])
    outer = Matryoshka(model, inner, document_tokens=(None, 3), token_weights=(2.0, 1.0))
    assert_equal(run(outer, batch, labels), run(Matryoshka(model, loss, **VIEWS), batch, labels), 1e-7)
