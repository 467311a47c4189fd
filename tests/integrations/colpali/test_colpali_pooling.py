"""colpali-engine's losses and scores with other poolings than the maximum."""

from contextlib import contextmanager

import pytest
import torch

from tests.support.colpali_batch import IN_BATCH, WITH_NEGATIVES, Batch, assert_close, unit
from tests.support.examples import example

pytest.importorskip("colpali_engine", reason='needs colpali-engine: pip install -e ".[test]"')

from colpali_engine import loss as colpali_losses
from colpali_engine.loss import late_interaction_losses
from colpali_engine.models import ColQwen2Processor

import pylate_fastmaxsim
from pylate_fastmaxsim import LogSumExp, Max, Softmax, TopK

POOLINGS = (TopK(3), Softmax(0.3), LogSumExp(0.1), TopK(1))


@pytest.fixture
def plain(monkeypatch):
    @contextmanager
    def block(pooling):
        def score(products):
            def of(query, doc):
                return aggregate(None, torch.einsum(products, query, doc))

            return of

        def aggregate(_, similarities, *args, **kwargs):
            return pooling.of(similarities, similarities != 0).sum(-1)

        with monkeypatch.context() as patch:
            patch.setattr(late_interaction_losses, "maxsim_inbatch", score("bnd,csd->bcns"))
            patch.setattr(late_interaction_losses, "maxsim_kd", score("bnd,bksd->bkns"))
            patch.setattr(colpali_losses.ColbertModule, "_aggregate", aggregate)
            yield

    return block


@pytest.mark.parametrize("pooling", POOLINGS, ids=str)
@pytest.mark.parametrize("name", IN_BATCH + WITH_NEGATIVES)
def test_losses_and_gradients_are_those_of_plain_pytorch(name, pooling, plain):
    batch = Batch("between", extra_documents=0 if name == "ColbertSigmoidLoss" else 4)
    offset = len(batch.leaves[1]) - 4
    loss = getattr(colpali_losses, name)(temperature=0.2)
    with plain(pooling):
        stock = batch.run(loss, offset)
    with pylate_fastmaxsim.enabled(pooling=pooling):
        assert_close(batch.run(loss, offset), stock)
    with pylate_fastmaxsim.enabled(pooling=Max()):
        assert batch.run(loss, offset)[0] != stock[0]


@pytest.mark.parametrize("name", ["ColbertLoss", "ColbertNegativeCELoss"])
def test_the_smooth_maximum_of_a_loss_counts_before_the_pooling_of_the_flag(name, caplog):
    loss = getattr(colpali_losses, name)(use_smooth_max=True, tau=0.05)
    batch = Batch("left")
    stock = batch.run(loss, 0)
    pylate_fastmaxsim.enable(pooling=TopK(2))
    assert_close(batch.run(loss, 0), stock)
    assert "use_smooth_max=True of a loss counts before the pooling of enable()" in caplog.text


@pytest.mark.parametrize("pooling", POOLINGS, ids=str)
def test_processor_scores_do_not_depend_on_the_padding(pooling):
    queries = [unit(length, 16, seed=length) for length in (4, 2, 6)]
    pages = [unit(length, 16, seed=10 + length) for length in (5, 9, 3, 8, 7)]
    with pylate_fastmaxsim.enabled(pooling=pooling):
        for batch_size in (128, 2):
            scores = ColQwen2Processor.score_multi_vector(queries, pages, batch_size=batch_size, device="cpu")
            for query, row in zip(queries, scores, strict=True):
                for vectors, score in zip(pages, row, strict=True):
                    similarities = query @ vectors.T
                    expected = pooling.of(similarities, torch.ones_like(similarities, dtype=torch.bool)).sum()
                    torch.testing.assert_close(score, expected, rtol=1e-5, atol=1e-5)


def test_what_only_stock_takes_is_an_error_with_another_pooling(monkeypatch):
    batch, inputs = Batch("left"), (unit(2, 3, 8, seed=0), unit(2, 5, 8, seed=1))
    monkeypatch.setenv("COLPALI_SCORES_BACKEND", "torch")
    pylate_fastmaxsim.enable(pooling=TopK(2))
    for name in ("ColbertLoss", *WITH_NEGATIVES):
        with pytest.raises(ValueError, match=r"enable\(pooling=TopK\(k=2\)\) .* COLPALI_SCORES_BACKEND=torch"):
            batch.run(getattr(colpali_losses, name)(), 0)
    with pytest.raises(ValueError, match=r"^BaseVisualRetrieverProcessor.score_multi_vector: .*COLPALI_SCORES_BACKEND"):
        ColQwen2Processor.score_multi_vector(*inputs, device="cpu")


def test_the_example_of_the_docs():
    names: dict = {}
    exec(example("pooling-colpali"), names)
    assert names["pages"].grad.any()
