"""PyLate's XTR scores and the losses with them, ours against stock: the same scores, loss and gradients."""

from __future__ import annotations

import logging

import pytest
import torch
from compared import assert_equal, batch_of, mode_of, run
from models import FAMILIES, features, load_model, sentences
from pylate import losses, scores
from pylate.scores import XTRKDScores, XTRScores
from torch.nn import functional as F

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.pylate import losses as pylate_losses
from pylate_fastmaxsim.integrations.pylate import xtr as pylate_xtr

LABELS = torch.rand(4, 3, generator=torch.Generator().manual_seed(0))
COUNT, WAYS, QUERY_LENGTH, LENGTH, DIM = 3, 2, 4, 6, 5


@pytest.fixture
def calls(monkeypatch):
    """How often the operator was called, by any of its callers."""
    made = []
    for module in (pylate_xtr, pylate_losses):

        def counted(*args, operator=module.xtr_scores, **kwargs):
            made.append(None)
            return operator(*args, **kwargs)

        monkeypatch.setattr(module, "xtr_scores", counted)
    return made


def embeddings(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(COUNT, QUERY_LENGTH, DIM, generator=generator).to(dtype)
    documents = torch.randn(COUNT, WAYS, LENGTH, DIM, generator=generator).to(dtype)
    return queries.requires_grad_(), documents.requires_grad_()


def masks(dtype):
    generator = torch.Generator().manual_seed(1)
    queries = torch.rand(COUNT, QUERY_LENGTH, generator=generator) < 0.7
    documents = torch.rand(COUNT, WAYS, LENGTH, generator=generator) < 0.8
    documents[0, 0] = False
    documents[-1, -1] = True
    return queries.to(dtype), documents.to(dtype)


@pytest.mark.parametrize("metric", [XTRScores, XTRKDScores])
@pytest.mark.parametrize("options", [{"k": 1}, {"k": 9}, {"k": 24}, {"k": 9, "document_chunk_size": 2}], ids=str)
@pytest.mark.parametrize("mask", [None, torch.bool, torch.int64, torch.float32], ids=str)
def test_scores_and_gradients_equal_stock(metric, options, mask, calls):
    metric = metric(**options)
    inputs = embeddings()
    given = () if mask is None else masks(mask)
    results = []
    for enabled in (False, True):
        if enabled:
            pylate_fastmaxsim.enable()
        result = metric(*inputs, *given)
        weights = torch.randn(result.shape, generator=torch.Generator().manual_seed(2))
        results.append((result, *torch.autograd.grad((result * weights).sum(), inputs)))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)
    assert len(calls) == 1


def test_the_default_instances_arrays_and_double_precision(calls):
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64).numpy()
    documents = torch.randn(3, 2, 60, 5, generator=generator, dtype=torch.float64).numpy()
    metrics = scores.xtr_scores, scores.xtr_kd_scores
    expected = [metric(queries, documents) for metric in metrics]
    with pylate_fastmaxsim.enabled():
        ours = [metric(queries, documents) for metric in metrics]
    assert len(calls) == 2 and [result.dtype for result in ours] == [torch.float32] * 2
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)


def test_a_metric_compiled_by_its_user(calls):
    metric = XTRScores(k=5)
    expected = metric(*embeddings())
    metric.compile()
    with pylate_fastmaxsim.enabled():
        torch.testing.assert_close(metric(*embeddings()), expected)
    assert calls


@pytest.mark.parametrize("metric", [XTRScores(k=5), XTRKDScores(k=5)], ids=["XTRScores", "XTRKDScores"])
def test_scores_in_one_graph(metric, calls):
    expected = metric(*embeddings())
    with pylate_fastmaxsim.enabled():
        compiled = torch.compile(lambda *args: metric(*args), fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(*embeddings()), expected)
    assert calls


def test_stock_is_back_afterwards():
    originals = XTRScores.__call__, XTRKDScores.__call__
    with pylate_fastmaxsim.enabled():
        assert (XTRScores.__call__, XTRKDScores.__call__) != originals
    assert (XTRScores.__call__, XTRKDScores.__call__) == originals


def test_weights_of_query_tokens_that_are_learned_leave_the_choice_of_tokens_alone(calls):
    weights = torch.zeros(COUNT, QUERY_LENGTH, requires_grad=True)

    def gradient():
        return torch.autograd.grad(XTRScores(k=5)(*embeddings(), queries_mask=weights).sum(), weights)[0]

    expected = gradient()
    assert expected.abs().max() > 0
    with pylate_fastmaxsim.enabled():
        torch.testing.assert_close(gradient(), expected)
    assert not calls


def test_a_subclass_with_scores_of_its_own_keeps_them(calls, caplog):
    class Doubled(XTRScores):
        def _score(self, *args):
            return 2 * super()._score(*args)

    metric = Doubled(k=5)
    expected = metric(*embeddings())
    with pylate_fastmaxsim.enabled(), caplog.at_level(logging.WARNING, "pylate_fastmaxsim"):
        assert torch.equal(metric(*embeddings()), expected)
    assert not calls and "its _score is not the code of a release" in caplog.text


def compare(loss_function, batch, labels=None, mode=None, **options):
    stock = run(loss_function, batch, labels)
    with pylate_fastmaxsim.enabled(**options):
        ours = run(loss_function, batch, labels)
        assert mode is None or mode_of(loss_function.model) == mode
    # These scores are float32, whatever the model computes in.
    assert_equal(ours, stock, 1e-5)


@pytest.mark.parametrize("family", FAMILIES[:1])
@pytest.mark.parametrize("k", [4, 60])
@pytest.mark.parametrize("loss_class", [losses.Contrastive, losses.CachedContrastive, losses.Distillation])
def test_losses(encoder, mode, family, k, loss_class, calls, caplog):
    model = load_model(encoder(family)).double()
    batch, labels, options = batch_of(model), None, {"score_metric": XTRScores(k)}
    if loss_class is losses.CachedContrastive:
        options["mini_batch_size"] = 4
    if loss_class is losses.Distillation:
        batch = features(model, sentences(4, longest=8), sentences(12, seed=1))
        labels = LABELS
        options = {"score_metric": XTRKDScores(k)}
    with caplog.at_level(logging.WARNING, "pylate_fastmaxsim"):
        compare(loss_class(model, **options), batch, labels, mode)
    assert calls and "is not accelerated" not in caplog.text


@pytest.mark.parametrize("replaced", ["_score", "__call__", "_score of the instance"])
@pytest.mark.parametrize("loss_class", [losses.Contrastive, losses.Distillation])
def test_losses_with_scores_that_a_script_replaced(model, monkeypatch, calls, caplog, replaced, loss_class):
    metric = (XTRKDScores if loss_class is losses.Distillation else XTRScores)(k=5)
    loss_function = loss_class(model, metric)
    batch = features(model, sentences(4, longest=8), sentences(12, seed=1))
    if loss_class is losses.Contrastive:
        batch = batch_of(model)
    plain = run(loss_function, batch, LABELS.double())[0]
    owner, name = (metric, "_score") if replaced.endswith("instance") else (XTRScores, replaced)
    stock = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: stock(*args, **kwargs).sin())
    expected = run(loss_function, batch, LABELS.double())
    assert expected[0] != plain
    with pylate_fastmaxsim.enabled(stock_masking=True):
        assert_equal(run(loss_function, batch, LABELS.double()), expected)
    assert not calls and "is not accelerated" in caplog.text


@pytest.mark.parametrize("stock_masking", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"size_average": False, "temperature": 0.05},
        {"score_mini_batch_size": 4},
        {"gather_across_devices": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("loss_class", [losses.Contrastive, losses.CachedContrastive])
def test_contrastive_options(model, loss_class, options, stock_masking):
    loss_function = loss_class(model, score_metric=XTRScores(30), **options)
    compare(loss_function, batch_of(model, columns=3), stock_masking=stock_masking)


@pytest.mark.parametrize("options", [{"size_average": False}, {"normalize_scores": False}], ids=str)
def test_distillation_options(model, options):
    loss_function = losses.Distillation(model, score_metric=XTRKDScores(30), **options)
    compare(loss_function, features(model, sentences(4, longest=8), sentences(12, seed=1)), LABELS)


@pytest.mark.parametrize("expansion", [{"do_query_expansion": False}, {"attend_to_expansion_tokens": True}], ids=str)
@pytest.mark.parametrize("loss_class", [losses.Contrastive, losses.CachedContrastive])
def test_query_expansion(encoder, loss_class, expansion):
    model = load_model(encoder("modernbert"), **expansion).double()
    compare(loss_class(model, score_metric=XTRScores(30)), batch_of(model))


@pytest.mark.parametrize("family", ["modernbert", "bert"])
@pytest.mark.parametrize("loss_class", [losses.Contrastive, losses.CachedContrastive, losses.Distillation])
def test_float32(encoder, mode, family, loss_class):
    model = load_model(encoder(family))
    if loss_class is losses.Distillation:
        # Scores are stretched to 0 and 1 by default, and rounding with them, stock's as well: to 1.5e-5 here.
        loss_function = loss_class(model, score_metric=XTRKDScores(30), normalize_scores=False)
        compare(loss_function, features(model, sentences(4, longest=8), sentences(12, seed=1)), LABELS, mode)
    else:
        compare(loss_class(model, score_metric=XTRScores(30)), batch_of(model), mode=mode)


@pytest.mark.parametrize("loss_class", [losses.Contrastive, losses.CachedContrastive])
def test_a_masked_token_counts_as_zero(model, mode, loss_class):
    """It shows where all live tokens of a document pass, and are negative."""
    batch = features(model, sentences(6, longest=8), ["a.", "b", "sea", "size!", "sky and sea", "gas"])
    mask = losses.contrastive.extract_skiplist_mask(batch, model.skiplist)[1]
    queries, documents = (F.normalize(model(dict(column))["token_embeddings"], dim=-1) for column in batch)
    similarities = torch.einsum("qsh,dth->qsdt", queries, documents)
    best = similarities.masked_fill(~mask, -torch.inf).amax(dim=-1)
    assert ((best < 0) & ~mask.all(dim=1)).any()
    compare(loss_class(model, score_metric=XTRScores(int(mask.sum()))), batch, mode=mode)


def test_a_small_last_batch_takes_all_its_tokens(model):
    batch = batch_of(model, columns=1, queries=2)
    loss_function = losses.Contrastive(model, score_metric=XTRScores(1000))
    with pytest.raises(RuntimeError, match="out of range"):
        run(loss_function, batch)
    largest = losses.Contrastive(model, score_metric=XTRScores(len(batch[1]["input_ids"].flatten())))
    with pylate_fastmaxsim.enabled():
        assert torch.equal(run(loss_function, batch)[0], run(largest, batch)[0])
