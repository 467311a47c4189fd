"""Losses of PyLate with XTR scores, beside the numbers that tests of all hosts compare."""

import pytest
import torch
from pylate import losses
from pylate.scores import XTRScores
from torch.nn import functional as F

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.pylate import losses as pylate_losses
from tests.support.compared import assert_as_stock, assert_equal, batch_for, run
from tests.support.hosts import operators
from tests.support.models import features, sentences
from tests.support.pylate_steps import metric_of


@pytest.mark.parametrize(
    "replaced, loss_class",
    [("__call__", losses.Contrastive), ("_score", losses.Distillation), ("_score of the instance", losses.Contrastive)],
)
def test_scores_that_a_script_replaced(model, monkeypatch, caplog, replaced, loss_class):
    metric = metric_of(loss_class, 5)
    loss_function = loss_class(model, metric)
    batch, labels = batch_for(loss_class, model)
    plain = run(loss_function, batch, labels)[0]
    owner = metric if replaced.endswith("instance") else XTRScores
    name = replaced.split()[0]
    stock = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: stock(*args, **kwargs).sin())
    expected = run(loss_function, batch, labels)
    assert expected[0] != plain
    calls = operators((pylate_losses, "xtr_scores"))(model, monkeypatch)
    with pylate_fastmaxsim.enabled(stock_masking=True):
        assert_equal(run(loss_function, batch, labels), expected)
    assert not calls and "is not accelerated" in caplog.text


def test_a_masked_token_counts_as_zero(model, mode):
    """It shows where all live tokens of a document pass, and are negative."""
    batch = features(model, sentences(6, longest=8), ["a.", "b", "sea", "size!", "sky and sea", "gas"])
    mask = losses.contrastive.extract_skiplist_mask(batch, model.skiplist)[1]
    queries, documents = (F.normalize(model(dict(column))["token_embeddings"], dim=-1) for column in batch)
    similarities = torch.einsum("qsh,dth->qsdt", queries, documents)
    best = similarities.masked_fill(~mask, -torch.inf).amax(dim=-1)
    assert ((best < 0) & ~mask.all(dim=1)).any()
    loss_function = losses.Contrastive(model, score_metric=XTRScores(int(mask.sum())))
    assert_as_stock(loss_function, batch, tolerance=1e-5, stock_masking=False)
