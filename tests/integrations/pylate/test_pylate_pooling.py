"""PyLate with another pooling than the maximum: scores, and losses beside those that tests of all hosts compare."""

import pytest
import torch
from pylate import losses, rank, scores
from torch.nn.utils.rnn import pad_sequence

import pylate_fastmaxsim
from pylate_fastmaxsim import LogSumExp, Max, PooledScores, Softmax, TokenBatch, TopK, reference
from pylate_fastmaxsim.integrations.pylate import losses as pylate_losses
from tests.support.compared import assert_equal, batch_of, run
from tests.support.encoded import mode_of
from tests.support.pooled_definitions import PlainScores

POOLINGS = [TopK(4), Softmax(0.1), LogSumExp(0.1)]


def test_losses_in_groups_and_in_chunks(model, monkeypatch):
    asked = []
    monkeypatch.setattr(pylate_losses, "queries_at_once", lambda *sizes: asked.append(sizes) or 1)
    metric = PooledScores(TopK(4))
    loss_function, batch = losses.CachedContrastive(model, score_mini_batch_size=2), batch_of(model)
    plain = run(losses.CachedContrastive(model, score_metric=PlainScores(metric)), batch)
    with pylate_fastmaxsim.enabled(pooling=metric.pooling):
        assert_equal(run(loss_function, batch), plain)
        assert mode_of(model) == {"grouped"}
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
