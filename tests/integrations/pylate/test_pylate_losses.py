"""PyLate's losses beside the numbers that tests of all hosts compare: masks, columns, metrics, adapters, launches."""

import inspect

import pytest
import torch
from peft import PrefixTuningConfig, TaskType, get_peft_model
from pylate import losses
from pylate.scores import XTRScores
from torch.nn import functional as F

import pylate_fastmaxsim
from pylate_fastmaxsim import TokenBatch, reference
from pylate_fastmaxsim.integrations.pylate import losses as pylate_losses
from tests.support.compared import assert_as_stock, assert_equal, batch_for, batch_of, run
from tests.support.hosts import operators
from tests.support.models import collated, features, load_model, sentences
from tests.support.pylate_steps import OPTIONS, OtherScores, metric_of

BOTH = losses.Contrastive, losses.CachedContrastive
ALL = *BOTH, losses.Distillation


@pytest.mark.parametrize("loss_class", ALL)
def test_every_option_is_compared(loss_class):
    # Options of later versions of PyLate are added to OPTIONS; those of earlier ones are a part.
    options = set(inspect.signature(loss_class).parameters) - {"model", "score_metric"}
    assert options <= set().union(*OPTIONS[loss_class])


@pytest.mark.parametrize("padding_free", [True, False])
def test_a_masked_token_wins_only_in_stock_masking(model, padding_free):
    loss_function = losses.Contrastive(model)
    batch = features(model, sentences(6, longest=8), ["a.", "b", "sea", "size!", "sky", "gas"])
    stock = run(loss_function, batch)[0]
    with pylate_fastmaxsim.enabled(padding_free=padding_free):
        ours = run(loss_function, batch)[0]
    queries, documents = (F.normalize(model(dict(column))["token_embeddings"], dim=-1) for column in batch)
    mask = losses.contrastive.extract_skiplist_mask(batch, model.skiplist)[1]
    exact = reference.maxsim(TokenBatch.from_padded(queries), TokenBatch.from_padded(documents, mask))
    assert ours == pytest.approx(F.cross_entropy(exact, torch.arange(6)).item(), rel=1e-10)
    assert abs(ours - stock) > 1e-3


def test_with_xtr_scores_a_masked_token_counts_as_zero(model, mode):
    """It shows where all live tokens of a document pass, and are negative."""
    batch = features(model, sentences(6, longest=8), ["a.", "b", "sea", "size!", "sky and sea", "gas"])
    mask = losses.contrastive.extract_skiplist_mask(batch, model.skiplist)[1]
    queries, documents = (F.normalize(model(dict(column))["token_embeddings"], dim=-1) for column in batch)
    similarities = torch.einsum("qsh,dth->qsdt", queries, documents)
    best = similarities.masked_fill(~mask, -torch.inf).amax(dim=-1)
    assert ((best < 0) & ~mask.all(dim=1)).any()
    loss_function = losses.Contrastive(model, score_metric=XTRScores(int(mask.sum())))
    assert_as_stock(loss_function, batch, tolerance=1e-5, stock_masking=False)


@pytest.mark.parametrize("loss_class", ALL)
def test_stock_masking_where_some_documents_have_no_masked_token(encoder, mode, loss_class):
    model = load_model(encoder("modernbert"), document_length=6).double()
    batch, labels, options = batch_of(model, queries=12), None, {}
    if loss_class is losses.Distillation:
        batch = features(model, sentences(12, longest=8), sentences(24, seed=1))
        labels, options = torch.rand(12, 2, dtype=torch.float64), {"normalize_scores": False}
    full = torch.cat(losses.contrastive.extract_skiplist_mask(batch, model.skiplist)[1:]).all(dim=1)
    assert full.any() and not full.all()
    loss_function = loss_class(model, **options)
    stock = run(loss_function, batch, labels)
    with pylate_fastmaxsim.enabled(stock_masking=True):
        assert_equal(run(loss_function, batch, labels), stock)
    with pylate_fastmaxsim.enabled():
        assert abs(run(loss_function, batch, labels)[0] - stock[0]) > 1e-6


def _sum_of_products(queries_embeddings, documents_embeddings, queries_mask=None, documents_mask=None):
    return torch.einsum("ash,bnth->abn", queries_embeddings, documents_embeddings).flatten(1)


@pytest.mark.parametrize("metric", [_sum_of_products, OtherScores()], ids=["own", "sub"])
@pytest.mark.parametrize("loss_class", BOTH)
def test_other_score_metrics_get_what_stock_gives_them(model, metric, loss_class, caplog):
    loss_function = loss_class(model, score_metric=metric)
    stock = run(loss_function, batch_of(model, collate=collated))
    pylate_fastmaxsim.enable(stock_masking=True)
    batch = batch_of(model, collate=collated)
    assert "token_total" in batch[1]
    for _ in range(2):
        assert_equal(run(loss_function, batch), stock)
    assert len([message for message in caplog.messages if "score_metric" in message]) == 1


@pytest.mark.parametrize(
    "replaced, loss_class",
    [("__call__", losses.Contrastive), ("_score", losses.Distillation), ("_score of the instance", losses.Contrastive)],
)
def test_xtr_scores_that_a_script_replaced(model, monkeypatch, caplog, replaced, loss_class):
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


@pytest.mark.parametrize(
    "losses_of, options, columns, said",
    [
        (ALL, {}, [6], "^{name}: .* at least one of documents, got 1 in all.$"),
        (BOTH, {}, [4, 4, 12], "all document columns must have as many texts as the first, got 4, 12"),
        (BOTH[1:], {"mini_batch_size": 0}, [4, 4], "mini_batch_size must be an integer of at least 1, got 0"),
        (BOTH[1:], {"mini_batch_size": 2.5}, [4, 4], "mini_batch_size must be an integer of at least 1, got 2.5"),
    ],
)
def test_bad_input(model, losses_of, options, columns, said):
    batch = [collated(model, sentences(count))[0] for count in columns]
    pylate_fastmaxsim.enable()
    for loss_class in losses_of:
        with pytest.raises(ValueError, match=said.format(name=loss_class.__name__)):
            loss_class(model, **options)(batch, torch.rand(6, 1))


def test_virtual_tokens_of_peft_that_come_after_the_first_batch(encoder, packed):
    model = load_model(encoder("bert")).double()
    loss_function, batch = losses.CachedContrastive(model), batch_of(model)
    with pylate_fastmaxsim.enabled(stock_masking=True):
        run(loss_function, batch)
        prefix = PrefixTuningConfig(task_type=TaskType.FEATURE_EXTRACTION, num_virtual_tokens=3)
        model[0].auto_model = get_peft_model(model[0].auto_model, prefix).double()
        ours = run(loss_function, batch)
    assert_equal(ours, run(loss_function, batch))


@pytest.mark.parametrize("loss_class", ALL)
# Only on a GPU does autocast make a normalised copy float32.
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_one_launch_scores_all_documents_in_the_autocast_dtype(encoder, packed, monkeypatch, loss_class, device):
    model = load_model(encoder("modernbert"), device=device)
    batch, labels = batch_for(loss_class, model)
    labels = None if labels is None else labels.to(device)
    loss_function = loss_class(model, **({"mini_batch_size": 4} if loss_class is losses.CachedContrastive else {}))
    pylate_fastmaxsim.enable()
    scored = operators((pylate_losses, "maxsim"))(model, monkeypatch)
    run(loss_function, batch, labels, bf16=True)
    (((queries, documents, *_), _),) = scored
    assert queries.values.dtype == documents.values.dtype == torch.bfloat16
    assert len(documents.values) == sum(int(column["attention_mask"].sum()) for column in batch[1:])
    assert len(documents) == sum(len(column["input_ids"]) for column in batch[1:])
