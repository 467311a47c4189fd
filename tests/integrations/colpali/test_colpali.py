"""colpali-engine's losses and processor scores: ours against its own, for every option, and with other poolings."""

import contextlib
import logging
import re
import sys
from importlib import metadata

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.colpali_batch import IN_BATCH, WITH_NEGATIVES, Batch, assert_close, unit
from tests.support.edited import edited

pytest.importorskip("colpali_engine", reason='needs colpali-engine: pip install -e ".[test]"')

from colpali_engine import loss as colpali_losses
from colpali_engine.loss import late_interaction_losses
from colpali_engine.models import ColPali, ColPaliProcessor, ColQwen2Processor
from colpali_engine.utils import maxsim as stock_scores

import pylate_fastmaxsim
from pylate_fastmaxsim import LogSumExp, Max, Softmax, TopK
from pylate_fastmaxsim.integrations import doctor
from pylate_fastmaxsim.integrations.hosts import find_replacements


def assert_same(batch: Batch, loss: torch.nn.Module, offset: int = 0, compiled: bool = False) -> None:
    stock = batch.run(loss, offset)
    with pylate_fastmaxsim.enabled():
        if compiled:
            torch._dynamo.reset()
            loss.compile(backend="aot_eager", fullgraph=True)
        ours = batch.run(loss, offset)
    assert ours[0].dtype == torch.float32
    assert_close(ours, stock)


LOSSES = IN_BATCH + WITH_NEGATIVES
SMOOTH = {"use_smooth_max": True, "tau": 0.02}
OPTIONS = [
    {"temperature": 0.5, "normalize_scores": False, "max_batch_size": 4},
    {"pos_aware_negative_filtering": True, "filter_threshold": 0.5, "filter_factor": 0.25},
    {"use_smooth_max": True, "tau": 0.3, "norm_tol": 0.1},
]
WEIGHTED = [{"in_batch_term_weight": weight, "temperature": 0.2} for weight in (0, 0.3, 1)]
FILTERED = {"pos_aware_negative_filtering": True, "filter_threshold": 0.8}
GATHERED = [{}, SMOOTH, FILTERED, FILTERED | SMOOTH]
# Of which loss, on what side the padding is, options, and how many documents of other ranks stand before.
CASES = [
    *((name, side, options, 0) for name in LOSSES for side in ("left", "right", "between") for options in ({}, SMOOTH)),
    *((name, "left", options, 0) for name in LOSSES for options in OPTIONS),
    *((name, "left", options, 0) for name in WITH_NEGATIVES for options in WEIGHTED),
    # As ContrastiveTrainer gathers them: this rank's documents are the last four of eight.
    *((name, "left", options, 4) for name in LOSSES if name != "ColbertSigmoidLoss" for options in GATHERED),
]


@pytest.mark.parametrize("name, side, options, offset", CASES)
def test_losses_and_gradients_are_those_of_stock(name, side, options, offset):
    assert_same(Batch(side, extra_documents=offset), getattr(colpali_losses, name)(**options), offset)


def test_rows_of_zeros_have_no_gradient():
    """As docs/colpali.md says; in stock the rows of a query have one, which the model multiplies by 0."""
    batch, gradients = Batch("right"), []
    queries, documents = (leaf * mask for leaf, mask in zip(batch.leaves[:2], batch.masks, strict=False))
    for context in (contextlib.nullcontext(), pylate_fastmaxsim.enabled()):
        leaf = queries.clone().requires_grad_()
        with context:
            colpali_losses.ColbertLoss()(leaf, documents).backward()
        gradients.append(leaf.grad)
    live = (queries != 0).any(dim=2)
    torch.testing.assert_close(gradients[1][live], gradients[0][live], rtol=1e-5, atol=1e-6)
    assert gradients[0][~live].any() and not gradients[1][~live].any()


@pytest.mark.parametrize("name", LOSSES)
def test_no_similarity_tensor(name, monkeypatch, caplog):
    with pylate_fastmaxsim.enabled():
        monkeypatch.setattr(torch, "einsum", None)
        for smooth in (False, True):
            Batch("left").run(getattr(colpali_losses, name)(use_smooth_max=smooth), 0)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_the_backend_that_the_environment_asks_for(monkeypatch, caplog):
    monkeypatch.setenv("COLPALI_SCORES_BACKEND", "torch")
    query, pages = unit(2, 3, 8, seed=0), unit(2, 5, 8, seed=1)
    expected = stock_scores.maxsim_inbatch(query, pages)
    with pylate_fastmaxsim.enabled():
        assert torch.equal(stock_scores.maxsim_inbatch(query, pages), expected)
    assert "COLPALI_SCORES_BACKEND=torch" in caplog.text
    assert any("COLPALI_SCORES_BACKEND=torch" in line for line in doctor.diagnose()["What falls back here"])


@pytest.mark.parametrize("name", WITH_NEGATIVES)
def test_what_does_not_fit_raises_as_in_stock(name):
    loss = getattr(colpali_losses, name)()
    wrong = (unit(4, 3, 8, seed=0), unit(3, 5, 8, seed=1), unit(4, 2, 5, 8, seed=2))
    with pytest.raises(RuntimeError) as stock:
        loss(*wrong)
    with pylate_fastmaxsim.enabled(), pytest.raises(RuntimeError, match=re.escape(str(stock.value))):
        loss(*wrong)


@pytest.mark.compile
@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("name", ["ColbertLoss", "ColbertNegativeCELoss"])
def test_compiled_as_one_graph(name, smooth, caplog):
    # colpali-engine itself looks at normalised scores, which no graph can hold.
    options = {"normalize_scores": False, "use_smooth_max": smooth}
    assert_same(Batch("left"), getattr(colpali_losses, name)(temperature=0.5, **options), compiled=True)
    assert not [record for record in caplog.records if record.name == "pylate_fastmaxsim"]


def mean_of_two(scores, use_smooth_max, dim_max, dim_sum):
    return scores.topk(2, dim=dim_max).values.mean(dim_max).sum(dim_sum)


AGGREGATED = [
    ("ColbertNegativeCELoss", "_aggregate", lambda self, *args, **kwargs: mean_of_two(*args, **kwargs)),
    ("ColbertPairwiseNegativeCELoss", "_aggregate", None),
    ("ColbertLoss", "_smooth_max", lambda self, scores, dim: scores.mean(dim)),
    ("ColbertNegativeCELoss", "_smooth_max", lambda self, scores, dim: scores.mean(dim)),
]


@pytest.mark.parametrize("name, replaced, method", AGGREGATED)
def test_another_aggregation_of_a_loss_counts(name, replaced, method, caplog):
    """By a subclass or, without a method, on the instance."""
    stock, options = getattr(colpali_losses, name), {"use_smooth_max": replaced == "_smooth_max"}
    loss = stock(**options) if method is None else type("Other", (stock,), {replaced: method})(**options)
    if method is None:
        loss._aggregate = mean_of_two
    value, usual = (Batch("left").run(each, 0)[0] for each in (loss, stock(**options)))
    with pylate_fastmaxsim.enabled():
        assert Batch("left").run(loss, 0)[0].item() == pytest.approx(value.item(), rel=1e-6)
    assert value.item() != pytest.approx(usual.item(), rel=1e-3)
    assert f"its {replaced} is not colpali-engine's own" in caplog.text


@pytest.mark.parametrize("while_enabled", [False, True])
@pytest.mark.parametrize(
    "owner, name, old, new, loss",
    [
        *((getattr(colpali_losses, loss), "forward", "self.temperature", "2", loss) for loss in WITH_NEGATIVES),
        (colpali_losses.ColbertModule, "_aggregate", "amax", "amin", "ColbertNegativeCELoss"),
        (stock_scores, "_torch_maxsim_kd", "amax", "amin", "ColbertPairwiseNegativeCELoss"),
        (stock_scores, "_torch_maxsim", "amax", "amin", "ColbertLoss"),
    ],
)
def test_edited_code_runs(owner, name, old, new, loss, while_enabled, monkeypatch, caplog):
    batch, loss = Batch("left"), getattr(colpali_losses, loss)()
    plain = batch.run(loss, 0)[0]
    function = edited(getattr(owner, name), old, new)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, function)
        stock = batch.run(loss, 0)[0]
    assert stock != plain
    if not while_enabled:
        monkeypatch.setattr(owner, name, function)
    pylate_fastmaxsim.enable()
    monkeypatch.setattr(owner, name, function)
    assert batch.run(loss, 0)[0] == stock
    assert (while_enabled and name == "forward") or f"{name} is not the code of a release" in caplog.text
    monkeypatch.undo()  # before it is switched off


@pytest.mark.parametrize("form", ["list", "padded", "list with zeros"])
@pytest.mark.parametrize("processor, batch_size", [(ColPaliProcessor, 128), (ColQwen2Processor, 3)])
def test_processor_scores(processor, form, batch_size):
    lengths = [5, 9, 3, 8, 7]
    queries = [unit(length, 16, seed=length) for length in (4, 2, 6)]
    # Of the opposite sign, so that a row of zeros wins wherever there is one.
    pages = [-unit(length, 16, seed=10 + length) for length in lengths]
    if form == "padded":
        queries, pages = (torch.nn.utils.rnn.pad_sequence(some, batch_first=True) for some in (queries, pages))
    if form == "list with zeros":
        pages = [F.pad(page, (0, 0, 1 + place % 2, 0)) for place, page in enumerate(pages)]
    stock = processor.score_multi_vector(queries, pages, batch_size=batch_size, device="cpu")
    with pylate_fastmaxsim.enabled():
        ours = processor.score_multi_vector(queries, pages, batch_size=batch_size, device="cpu")
        assert ours.shape == (3, 5) and ours.dtype == torch.float32
        torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-6)
        with pytest.raises(ValueError, match="No passages"):
            processor.score_multi_vector(queries, [], device="cpu")
    if form == "list":
        # Padded with the others of its batch, any page but the longest scores 0.
        assert (stock[0] < 0).tolist() == [False, True, False, batch_size == 3, False]


def test_without_pylate_it_accelerates_colpali_engine_alone(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "pylate", None)
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    caplog.set_level(logging.INFO, "pylate_fastmaxsim")
    pylate_fastmaxsim.enable()
    (line,) = caplog.messages
    assert line.startswith(f"colpali-engine {metadata.version('colpali-engine')} is accelerated: fused MaxSim in ")
    assert all(each.patch.target.startswith("colpali_engine") for each in find_replacements() if each.left is None)


@pytest.mark.parametrize("version", ["0.3.17", "0.4.0"])
def test_another_version_of_colpali_engine_runs_as_it_came(version, monkeypatch, caplog):
    pytest.importorskip("pylate")
    monkeypatch.setattr(sys.modules["colpali_engine"], "__version__", version, raising=False)
    stock = stock_scores.maxsim_inbatch.__code__
    with pylate_fastmaxsim.enabled():
        assert stock_scores.maxsim_inbatch.__code__ is stock
    assert f"installed is {version}" in caplog.text
    assert f"installed is {version}" in doctor.diagnose()["What falls back here"][0]
    monkeypatch.setitem(sys.modules, "pylate", None)
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(ImportError, match=f"from 0.3.18 up to but not including 0.4; installed is {version}"):
        pylate_fastmaxsim.enable()


@pytest.mark.parametrize("training", [True, False])
def test_colpali_computes_no_words(training, tmp_path):
    from tests.support.visual_models import build_visual_model, page

    folder = build_visual_model(tmp_path, "colpali")
    model, processor = ColPali.from_pretrained(folder).train(training), ColPaliProcessor.from_pretrained(folder)
    model.model.tie_weights()
    batch = processor.process_images([page(0), page(1)])
    assert "labels" in batch
    words: list[int] = []
    model.model.lm_head.register_forward_hook(lambda module, args, output: words.append(output.shape[1]))

    def run() -> tuple[Tensor, list[Tensor]]:
        model.zero_grad()
        embeddings = model(**batch)
        embeddings.square().sum(dim=(0, 1)).cumsum(0).sum().backward()
        return embeddings.detach(), [weight.grad for weight in model.parameters() if weight.grad is not None]

    embeddings, gradients = run()
    with pylate_fastmaxsim.enabled():
        ours, our_gradients = run()
    assert words == [embeddings.shape[1], 1]
    assert torch.equal(ours, embeddings) and len(our_gradients) == len(gradients) > 20
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(our_gradients, gradients, strict=True))


POOLINGS = (TopK(3), Softmax(0.3), LogSumExp(0.1), TopK(1))


@pytest.fixture
def plain(monkeypatch):
    @contextlib.contextmanager
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
@pytest.mark.parametrize("name", LOSSES)
def test_losses_with_other_poolings_are_those_of_plain_pytorch(name, pooling, plain):
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
def test_pooled_scores_of_processors_do_not_depend_on_the_padding(pooling):
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


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_on_a_gpu(name, dtype, monkeypatch):
    batch = Batch("left", queries=16, d=128)
    loss = getattr(colpali_losses, name)(temperature=0.5).cuda()
    batch.leaves, batch.masks = ([each.to("cuda", dtype) for each in some] for some in (batch.leaves, batch.masks))
    with pylate_fastmaxsim.enabled():
        ours, our_gradients = batch.run(loss, 0)
    batch.leaves, batch.masks = ([each.double() for each in some] for some in (batch.leaves, batch.masks))
    # Else an installed late-interaction-kernels would score, in float32.
    monkeypatch.setenv("COLPALI_SCORES_BACKEND", "torch")
    exact, gradients = batch.run(loss, 0)
    assert exact.dtype == torch.float64
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours.double(), exact, rtol=tolerance, atol=0)
    for mine, theirs in zip(our_gradients, gradients, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=tolerance, atol=tolerance * float(theirs.abs().max()))
