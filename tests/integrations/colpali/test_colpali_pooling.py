"""colpali-engine's losses and scores with other poolings than the maximum."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from tests.support.colpali_batch import IN_BATCH, WITH_NEGATIVES, Batch, assert_close, unit
from tests.support.examples import example

pytest.importorskip("colpali_engine", reason='needs colpali-engine: pip install -e ".[test]"')

from colpali_engine import loss as colpali_losses
from colpali_engine.loss import late_interaction_losses
from colpali_engine.models import ColQwen2, ColQwen2Processor

import pylate_fastmaxsim
from pylate_fastmaxsim import LogSumExp, Max, Softmax, TopK
from tests.support.visual_models import build_visual_model, page

POOLINGS = (TopK(3), Softmax(0.3), LogSumExp(0.1), TopK(1))


@pytest.fixture
def plain(monkeypatch):
    """``with plain(pooling)``: colpali-engine pools so, in plain PyTorch. Rows of zeros are left out."""

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


@pytest.mark.compile
@pytest.mark.parametrize("smooth", [False, True])
def test_compiled_as_one_graph(smooth):
    # colpali-engine itself looks at normalised scores, which no graph can hold.
    loss = colpali_losses.ColbertLoss(temperature=0.5, normalize_scores=False, use_smooth_max=smooth)
    pylate_fastmaxsim.enable(pooling=TopK(2))
    eager = Batch("left").run(loss, 0)
    loss.compile(backend="aot_eager", fullgraph=True)
    assert_close(Batch("left").run(loss, 0), eager)
    torch._dynamo.reset()


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
    with pytest.raises(
        ValueError, match=r"^BaseVisualRetrieverProcessor.score_multi_vector: .* COLPALI_SCORES_BACKEND"
    ):
        ColQwen2Processor.score_multi_vector(*inputs, device="cpu")


def test_the_example_of_the_docs():
    names: dict = {}
    exec(example("pooling-colpali"), names)
    assert names["pages"].grad.any()


def test_weights_of_a_model_of_pages(tmp_path, plain):
    """Pages of several sizes, and shorter queries: the model multiplies padding by 0."""
    folder = build_visual_model(tmp_path, "colqwen2")
    model, processor = ColQwen2.from_pretrained(folder), ColQwen2Processor.from_pretrained(folder)
    pages = processor.process_images([page(number) for number in range(4)])
    queries = processor.process_texts(["a page", "another page of lines", "red", "blue lines on grey"])
    assert not pages["attention_mask"].all() and not queries["attention_mask"].all()

    def run(**options):
        model.zero_grad()
        loss = colpali_losses.ColbertLoss(temperature=0.2, normalize_scores=False, **options)
        value = loss(model(**queries), model(**pages))
        value.backward()
        return value.detach(), [weight.grad for weight in model.parameters() if weight.grad is not None]

    def assert_same(pooling, stock, **options):
        with pylate_fastmaxsim.enabled(pooling=pooling):
            value, gradients = run(**options)
        torch.testing.assert_close(value, stock[0], rtol=1e-5, atol=0)
        largest = max(float(gradient.abs().max()) for gradient in stock[1])
        for mine, theirs in zip(gradients, stock[1], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5 * largest)

    assert_same(Max(), run(use_smooth_max=True), use_smooth_max=True)
    for pooling in POOLINGS:
        with plain(pooling):
            stock = run()
        assert_same(pooling, stock)
