"""PyLate's XTR scores and the losses with them, ours against stock: the same scores, loss and gradients."""

from __future__ import annotations

import pytest
import torch
from pylate import losses, scores
from pylate.scores import XTRKDScores, XTRScores
from torch.nn import functional as F

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.pylate import losses as pylate_losses
from pylate_fastmaxsim.integrations.pylate import scores as pylate_scores
from tests.support.compared import assert_equal, batch_for, batch_of, mode_of, run
from tests.support.models import features, load_model, sentences

COUNT, WAYS, QUERY_LENGTH, LENGTH, DIM = 3, 2, 4, 6, 5


@pytest.fixture
def calls(monkeypatch):
    """How often the operator was called, by any of its callers."""
    made = []
    for module in (pylate_scores, pylate_losses):

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
@pytest.mark.parametrize("mask", [None, torch.bool, torch.float32], ids=str)
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


@pytest.mark.parametrize("kind", [XTRScores, XTRKDScores])
def test_compiled_scores(kind, calls):
    metric, compiled_by_user = kind(k=5), kind(k=5)
    expected = metric(*embeddings())
    compiled_by_user.compile(backend="eager")
    with pylate_fastmaxsim.enabled():
        torch.testing.assert_close(compiled_by_user(*embeddings()), expected)
        assert calls
        calls.clear()
        compiled = torch.compile(lambda *args: metric(*args), fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(*embeddings()), expected)
        assert calls


def test_weights_of_query_tokens_that_are_learned_leave_the_choice_of_tokens_alone(calls):
    weights = torch.zeros(COUNT, QUERY_LENGTH, requires_grad=True)

    def gradient():
        return torch.autograd.grad(XTRScores(k=5)(*embeddings(), queries_mask=weights).sum(), weights)[0]

    expected = gradient()
    assert expected.abs().max() > 0
    with pylate_fastmaxsim.enabled():
        torch.testing.assert_close(gradient(), expected)
    assert not calls


def compare(loss_function, batch, labels=None, mode=None, **options):
    stock = run(loss_function, batch, labels)
    with pylate_fastmaxsim.enabled(**options):
        ours = run(loss_function, batch, labels)
        assert mode is None or mode_of(loss_function.model) == mode
    # These scores are float32, whatever the model computes in.
    assert_equal(ours, stock, 1e-5)


@pytest.mark.parametrize("k", [4, 60])
@pytest.mark.parametrize("loss_class", [losses.Contrastive, losses.CachedContrastive, losses.Distillation])
def test_losses(model, mode, k, loss_class, calls, caplog):
    metric = (XTRKDScores if loss_class is losses.Distillation else XTRScores)(k)
    options = {"mini_batch_size": 4} if loss_class is losses.CachedContrastive else {}
    compare(loss_class(model, metric, **options), *batch_for(loss_class, model), mode)
    assert calls and "is not accelerated" not in caplog.text


@pytest.mark.parametrize(
    "replaced, loss_class",
    [
        ("_score", losses.Distillation),
        ("__call__", losses.Contrastive),
        ("_score of the instance", losses.Contrastive),
        ("_score of a subclass", losses.Contrastive),
    ],
)
def test_losses_with_scores_that_a_script_replaced(model, monkeypatch, calls, caplog, replaced, loss_class):
    metric = (XTRKDScores if loss_class is losses.Distillation else XTRScores)(k=5)
    loss_function = loss_class(model, metric)
    batch, labels = batch_for(loss_class, model)
    plain = run(loss_function, batch, labels)[0]
    if replaced.endswith("subclass"):
        metric.__class__ = type("Own", (XTRScores,), {})
    owner = {"instance": metric, "subclass": type(metric)}.get(replaced.split()[-1], XTRScores)
    name = replaced.split()[0]
    stock = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: stock(*args, **kwargs).sin())
    expected = run(loss_function, batch, labels)
    assert expected[0] != plain
    with pylate_fastmaxsim.enabled(stock_masking=True):
        assert_equal(run(loss_function, batch, labels), expected)
    assert not calls and "is not accelerated" in caplog.text


@pytest.mark.parametrize(
    "loss_class, options",
    [
        (losses.Contrastive, {"size_average": False, "temperature": 0.05}),
        (losses.Contrastive, {"score_mini_batch_size": 4, "gather_across_devices": True}),
        (losses.CachedContrastive, {"size_average": False, "temperature": 0.05}),
        (losses.CachedContrastive, {"score_mini_batch_size": 4, "gather_across_devices": True}),
        (losses.Distillation, {"size_average": False}),
        (losses.Distillation, {"normalize_scores": False}),
    ],
)
@pytest.mark.parametrize("expand", [True, False])
def test_options(encoder, loss_class, options, expand):
    model = load_model(encoder("modernbert"), do_query_expansion=expand).double()
    metric = (XTRKDScores if loss_class is losses.Distillation else XTRScores)(30)
    compare(loss_class(model, metric, **options), *batch_for(loss_class, model), stock_masking=expand)


def test_a_masked_token_counts_as_zero(model, mode):
    """It shows where all live tokens of a document pass, and are negative."""
    batch = features(model, sentences(6, longest=8), ["a.", "b", "sea", "size!", "sky and sea", "gas"])
    mask = losses.contrastive.extract_skiplist_mask(batch, model.skiplist)[1]
    queries, documents = (F.normalize(model(dict(column))["token_embeddings"], dim=-1) for column in batch)
    similarities = torch.einsum("qsh,dth->qsdt", queries, documents)
    best = similarities.masked_fill(~mask, -torch.inf).amax(dim=-1)
    assert ((best < 0) & ~mask.all(dim=1)).any()
    compare(losses.Contrastive(model, score_metric=XTRScores(int(mask.sum()))), batch, mode=mode)


def test_a_small_last_batch_takes_all_its_tokens(model):
    batch = batch_of(model, columns=1, queries=2)
    loss_function = losses.Contrastive(model, score_metric=XTRScores(1000))
    with pytest.raises(RuntimeError, match="out of range"):
        run(loss_function, batch)
    largest = losses.Contrastive(model, score_metric=XTRScores(len(batch[1]["input_ids"].flatten())))
    with pylate_fastmaxsim.enabled():
        assert torch.equal(run(loss_function, batch)[0], run(largest, batch)[0])
