"""PyLate with another pooling than the maximum: scores, and losses beside those that tests of all hosts compare."""

from __future__ import annotations

import pytest
import torch
from pylate import evaluation, losses, rank, scores
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

import pylate_fastmaxsim
from pylate_fastmaxsim import LogSumExp, Max, PooledScores, Softmax, TokenBatch, TopK, reference
from pylate_fastmaxsim.integrations.pylate import losses as pylate_losses
from tests.support.compared import assert_equal, batch_for, batch_of, mode_of, run
from tests.support.models import load_model, sentences
from tests.support.pooled_definitions import PlainScores

POOLINGS = [TopK(4), Softmax(0.1), LogSumExp(0.1)]


class ZeroRows(nn.Module):
    """A head without a positive number for some tokens, whose vectors are then zero."""

    made = False

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        zero = values[..., :1] > 0
        self.made |= bool(zero.any())
        return values.masked_fill(zero, 0)


@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("pooling", [Max(), POOLINGS[0], POOLINGS[2]])
@pytest.mark.parametrize("loss_class", [losses.Contrastive, losses.Distillation])
def test_tokens_whose_vectors_are_zero_do_not_count(encoder, loss_class, pooling, expand):
    """Without a mask, as of queries with expansion, and with one, in training as in evaluation."""
    model = load_model(encoder("bert", num_hidden_layers=1), do_query_expansion=expand).double()
    model[1].activation_function = zeros = ZeroRows()
    batch, labels = batch_for(loss_class, model)
    own = loss_class is losses.Distillation
    loss_function = loss_class(model, score_metric=PooledScores(pooling, length_normalize=True, own_documents=own))
    stock = run(loss_function, batch, labels)
    assert zeros.made
    with pylate_fastmaxsim.enabled(padding_free="always"):
        assert_equal(run(loss_function, batch, labels), stock)
        assert mode_of(model) == "grouped"
    if pooling != Max():
        stock = run(loss_class(model, score_metric=PooledScores(pooling, own_documents=own)), batch, labels)
        with pylate_fastmaxsim.enabled(padding_free="always", pooling=pooling):
            assert_equal(run(loss_class(model), batch, labels), stock)


def test_losses_in_groups_and_in_chunks(model, monkeypatch):
    asked = []
    monkeypatch.setattr(pylate_losses, "queries_at_once", lambda *sizes: asked.append(sizes) or 1)
    metric = PooledScores(TopK(4))
    loss_function, batch = losses.CachedContrastive(model, score_mini_batch_size=2), batch_of(model)
    plain = run(losses.CachedContrastive(model, score_metric=PlainScores(metric)), batch)
    with pylate_fastmaxsim.enabled(pooling=metric.pooling):
        assert_equal(run(loss_function, batch), plain)
        assert mode_of(model) == "grouped"
    assert asked == [(12, 12, 4)]  # tokens of a query, documents, and the four winners of each, a byte each


def test_a_pooling_that_changes_while_training(model, packed):
    metric = PooledScores(Softmax(1.0))
    loss_function, batch = losses.Contrastive(model, score_metric=metric), batch_of(model)
    pylate_fastmaxsim.enable()
    for metric.pooling in (Softmax(1.0), Softmax(0.1), Max()):
        ours = run(loss_function, batch)
        assert_equal(ours, run(losses.Contrastive(model, score_metric=PlainScores(metric)), batch))
    metric.pooling = 4
    with pytest.raises(TypeError, match=r"^Contrastive: pooling must be Max\(\), .* got 4"):
        run(loss_function, batch)


def test_a_loss_that_is_left_to_stock_pools_all_the_same(model):
    class Subclass(losses.Contrastive):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    batch = batch_of(model)
    plain = run(losses.Contrastive(model, score_metric=PlainScores(PooledScores(TopK(4)))), batch)
    pylate_fastmaxsim.enable(pooling=TopK(4))
    assert_equal(run(Subclass(model), batch), plain)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_scores_of_embeddings_of_different_lengths(pooling):
    """As ``encode`` returns them, of two queries and three documents for each, or padded with zeros."""
    torch.manual_seed(0)
    queries, documents = ([torch.randn(length, 8) for length in each] for each in ((3, 5), (1, 7, 4, 2, 9, 3)))
    expected = reference.pooled_scores(*map(TokenBatch.from_list, (queries, documents)), pooling=pooling)
    own = expected.view(2, 2, 3)[range(2), range(2)]
    padded, padded_documents = (pad_sequence(each, batch_first=True) for each in (queries, documents))
    groups = padded_documents.unflatten(0, (2, 3))
    # A mask that counts rows of zeros changes nothing: losses have masks, evaluators have none.
    masks = [torch.ones(each.shape[:2]) for each in (padded, padded_documents)]
    pylate_fastmaxsim.enable(pooling=pooling)
    for result, gold in (
        (scores.colbert_scores(padded, padded_documents), expected),
        (scores.colbert_scores(padded, padded_documents, *masks), expected),
        (scores.ColBERTScores()(padded, groups), expected),
        (scores.colbert_kd_scores(padded, groups), own),
        (scores.colbert_scores_pairwise(queries, documents[::3]), own[:, 0]),
        (scores.colbert_scores_pairwise(padded, padded_documents[::3]), own[:, 0]),
    ):
        torch.testing.assert_close(result, gold)
    results = rank.rerank([[0, 1, 2], [0, 1, 2]], queries, [documents[:3], documents[3:]])
    for result, row in zip(results, own, strict=True):
        best, order = row.sort(descending=True)
        assert [each["id"] for each in result] == order.tolist()
        assert [each["score"] for each in result] == pytest.approx(best.tolist(), rel=1e-5)


def test_evaluator(encoder):
    """PyLate's evaluator pads embeddings with zeros and gives no mask."""
    model = load_model(encoder("modernbert")).eval()
    queries, documents, labels = sentences(4, longest=8), sentences(12, seed=1), torch.rand(4, 3)
    groups = [documents[begin : begin + 3] for begin in range(0, 12, 3)]
    evaluator = evaluation.ColBERTDistillationEvaluator(queries, groups, labels.tolist(), write_csv=False)
    with pylate_fastmaxsim.enabled(pooling=Softmax(0.1)):
        ours = evaluator(model)["kl_divergence"]
    encoded = [
        TokenBatch.from_list(model.encode(texts, is_query=texts is queries, convert_to_numpy=False))
        for texts in (queries, documents)
    ]
    expected = reference.pooled_scores(*encoded, torch.arange(12).view(4, 3), pooling=Softmax(0.1))
    lowest, highest = expected.min(1, keepdim=True).values, expected.max(1, keepdim=True).values
    student = F.log_softmax((expected - lowest) / (highest - lowest + 1e-8), dim=-1)
    loss = F.kl_div(student, F.log_softmax(labels, dim=-1), reduction="batchmean", log_target=True)
    assert ours == pytest.approx(loss.item(), rel=1e-4)


def test_what_only_stock_could_score_is_an_error(model, monkeypatch):
    queries, documents = torch.randn(2, 3, 4), torch.randn(2, 5, 4)
    pylate_fastmaxsim.enable(pooling=TopK(4))
    with pytest.raises(ValueError, match=r"colbert_scores: with enable\(pooling=TopK\(k=4\)\) .* maximum: .*'torch'"):
        scores.colbert_scores(queries, documents, backend="torch")
    monkeypatch.setenv("PYLATE_SCORES_BACKEND", "torch")
    with pytest.raises(ValueError, match="the maximum: the environment asks for it with PYLATE_SCORES_BACKEND=torch"):
        run(losses.Contrastive(model), batch_of(model))


def test_scores_that_are_not_known_code_refuse_another_pooling(monkeypatch):
    stock = scores.ColBERTScores.__call__
    changed = lambda self, *args, **kwargs: 2 * stock(self, *args, **kwargs)  # noqa: E731
    monkeypatch.setattr(scores.ColBERTScores, "__call__", changed)
    sentence = r"pooling=TopK\(k=4\) cannot be used: its scores would take the maximum. .*ColBERTScores.__call__ is not"
    with pytest.raises(ValueError, match=sentence):
        pylate_fastmaxsim.enable(pooling=TopK(4))
    pylate_fastmaxsim.enable()
    with pytest.raises(ValueError, match=sentence):
        pylate_fastmaxsim.enable(pooling=TopK(4))
    monkeypatch.undo()
    pylate_fastmaxsim.enable(pooling=TopK(4))
