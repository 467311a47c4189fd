"""Losses, scores and evaluators of a MultiVectorEncoder with other poolings than the maximum."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from sentence_transformers import MultiVectorEncoder, util
from sentence_transformers.multi_vector_encoder import evaluation, losses, scoring

import pylate_fastmaxsim
from pylate_fastmaxsim import LogSumExp, Max, PooledScores, Softmax, TopK
from tests.support.examples import example
from tests.support.multi_vector import NEGATIVES, POSITIVES, QUERIES, TEACHER, assert_equal, batch_of, load, modes, run

POOLINGS = (TopK(3), Softmax(0.3), LogSumExp(0.1))

# And whether each query has documents of its own.
LOSSES = [
    (losses.MultiVectorMultipleNegativesRankingLoss, {"score_mini_batch_size": 3}, False),
    (losses.CachedMultiVectorMultipleNegativesRankingLoss, {"mini_batch_size": 3}, False),
    (losses.MultiVectorDistillKLDivLoss, {}, True),
    (losses.MultiVectorMarginMSELoss, {}, True),
]


@pytest.fixture
def model(encoder) -> MultiVectorEncoder:
    return load(encoder("bert"))


def plain_scores(pooling, own: bool):
    """A ``similarity_fct`` in plain PyTorch."""

    def scores(queries, documents, queries_mask, documents_mask):
        similarities = torch.einsum("qsd,ptd->qpst", queries, documents.flatten(0, -3))
        live = documents_mask.flatten(0, -2)[:, None].expand_as(similarities)
        values = (pooling.of(similarities, live) * queries_mask[:, None]).sum(-1)
        if not own:
            return values
        values = values.view(len(queries), len(queries), -1).diagonal().T
        return values if documents.dim() == 4 else values.squeeze(1)

    return scores


@pytest.mark.parametrize("pooling", POOLINGS, ids=str)
@pytest.mark.parametrize("loss_class, options, own", LOSSES)
def test_losses_and_gradients_are_those_of_plain_pytorch(model, packed, loss_class, options, own, pooling):
    stock = run(model, loss_class(model, similarity_fct=plain_scores(pooling, own), **options))
    own_pooling = loss_class(model, similarity_fct=PooledScores(pooling, own_documents=own), **options)
    assert_equal(run(model, own_pooling), stock)
    for loss, of_the_flag in ((loss_class(model, **options), pooling), (own_pooling, TopK(2))):
        with pylate_fastmaxsim.enabled(pooling=of_the_flag):
            assert_equal(run(model, loss), stock)
            assert modes(model) == {"packed"}


@pytest.mark.parametrize("length_normalize", [False, True])
def test_the_mean_over_query_tokens(model, packed, length_normalize):
    """Of the maximum: MeanMaxSim, which is scored without a similarity tensor as well."""
    stock = run(
        model, losses.MultiVectorMultipleNegativesRankingLoss(model, similarity_fct=scoring.mean_colbert_scores)
    )
    metric = PooledScores(Max(), length_normalize=True)
    pylate_fastmaxsim.enable()
    assert_equal(run(model, losses.MultiVectorMultipleNegativesRankingLoss(model, similarity_fct=metric)), stock)
    assert modes(model) == {"packed"}


@pytest.mark.parametrize("loss_class, options, own", LOSSES)
def test_a_metric_of_other_documents_than_the_loss_scores_is_an_error(model, loss_class, options, own):
    loss = loss_class(model, similarity_fct=PooledScores(TopK(2), own_documents=not own), **options)
    pylate_fastmaxsim.enable()
    with pytest.raises(ValueError, match=rf"^{loss_class.__name__} scores .* own_documents={own}\), got PooledScores"):
        loss(batch_of(model), TEACHER)


torch.manual_seed(0)
VECTORS = torch.randn(3, 5, 16)
GROUPS = torch.randn(3, 2, 7, 16)
VECTORS_MASK = torch.arange(5) < torch.tensor([5, 2, 1])[:, None]
GROUPS_MASK = torch.rand(3, 2, 7) < 0.6
GROUPS_MASK[1, 1] = False
RAGGED = [vectors[mask] for vectors, mask in zip(VECTORS, VECTORS_MASK, strict=True)]
PASSAGES = [vectors[mask] for vectors, mask in zip(GROUPS.flatten(0, 1), GROUPS_MASK.flatten(0, 1), strict=True)]


@pytest.mark.parametrize("pooling", [*POOLINGS, Max()], ids=str)
def test_every_score_pools(pooling):
    masks = {"queries_mask": VECTORS_MASK, "documents_mask": GROUPS_MASK}
    all_pairs = plain_scores(pooling, own=False)(VECTORS, GROUPS, **masks)
    # An empty document ranks last, as ever in Sentence Transformers.
    all_pairs[:, 3] = util.maxsim(RAGGED, PASSAGES)[:, 3]
    own = all_pairs.view(3, 3, 2).diagonal().T
    counts = VECTORS_MASK.sum(1, keepdim=True)
    pylate_fastmaxsim.enable(pooling=pooling)
    for ours, expected in (
        (util.maxsim(RAGGED, PASSAGES), all_pairs),
        (util.mean_maxsim(RAGGED, PASSAGES), all_pairs / counts),
        (util.maxsim_pairwise(RAGGED, PASSAGES[1::2]), own[:, 1]),
        (util.mean_maxsim_pairwise(RAGGED, PASSAGES[1::2]), own[:, 1] / counts[:, 0]),
        (scoring.colbert_scores(VECTORS, GROUPS, **masks), all_pairs),
        (scoring.mean_colbert_scores(VECTORS, GROUPS, **masks), all_pairs / counts),
        (scoring.colbert_kd_scores(VECTORS, GROUPS, **masks), own),
    ):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_what_only_stock_takes_is_an_error_with_another_pooling():
    weighted = {"a_mask": torch.rand(3, 5)}
    pylate_fastmaxsim.enable(pooling=TopK(2))
    assert util.maxsim(VECTORS, []).shape == (3, 0)
    with pytest.raises(
        ValueError, match=r"^maxsim: with enable\(pooling=TopK\(k=2\)\) .*: a mask of queries may weigh"
    ):
        util.maxsim(VECTORS, VECTORS, **weighted)
    pylate_fastmaxsim.enable(pooling=Max())
    assert util.maxsim(VECTORS, VECTORS, **weighted).shape == (3, 3)


def test_the_example_of_the_docs(encoder):
    names: dict = {}
    stand_in = {'"answerdotai/ModernBERT-base"': repr(encoder("modernbert"))}
    exec(example("pooled-scores-multi-vector", stand_in), names)
    assert names["scores"].shape == (1, 2)
    for loss in ("contrastive", "margins"):
        names[loss](batch_of(names["model"]), TEACHER.float()).backward()


def test_xtr_scores_stay_as_they_are(caplog):
    stock = scoring.xtr_scores(VECTORS, GROUPS, top_k=5)
    pylate_fastmaxsim.enable(pooling=TopK(2))
    torch.testing.assert_close(scoring.xtr_scores(VECTORS, GROUPS, top_k=5), stock)
    assert "The pooling of enable() has no effect with XTR scores" in caplog.text


def test_evaluators_pool_with_the_flag_and_by_a_metric(model):
    model.float().eval()
    samples = [
        {"query": query, "positive": [positive], "negative": [negative]}
        for query, positive, negative in zip(QUERIES, POSITIVES, NEGATIVES, strict=True)
    ]
    ids = {str(place): query for place, query in enumerate(QUERIES)}
    rerank = partial(evaluation.MultiVectorRerankingEvaluator, samples, write_csv=False)
    search = partial(
        evaluation.MultiVectorInformationRetrievalEvaluator,
        ids,
        dict(zip(ids, POSITIVES, strict=True)),
        {key: {key} for key in ids},
        write_csv=False,
    )
    distill = partial(
        evaluation.MultiVectorDistillationEvaluator, QUERIES, POSITIVES, TEACHER[:, 0].tolist(), write_csv=False
    )
    metric, pairs = PooledScores(TopK(3)), PooledScores(TopK(3), own_documents=True)
    by_metric = [
        *(rerank(similarity_fct=metric, use_batched_encoding=batched)(model) for batched in (True, False)),
        search(score_functions={"maxsim": metric})(model),
        distill(similarity_fct=pairs)(model),
    ]
    usual = [rerank()(model), search()(model), distill()(model)]
    pylate_fastmaxsim.enable(pooling=TopK(3))
    with_flag = [rerank()(model), search()(model), distill()(model)]
    assert by_metric == [with_flag[0], *map(pytest.approx, with_flag)]
    assert all(one != other for one, other in zip(with_flag, usual, strict=True))
