"""PyLate's losses, ours against stock: the same loss and the same gradients."""

from __future__ import annotations

import logging

import pytest
import torch
from compared import assert_equal, batch_of, mode_of, run
from models import FAMILIES, collated, features, load_model, looking, sentences
from peft import LoraConfig, PrefixTuningConfig, TaskType, get_peft_model
from pylate import losses, scores
from torch.nn import functional as F

import pylate_fastmaxsim
from pylate_fastmaxsim import TokenBatch, reference


@pytest.mark.parametrize(
    "family, loss_class, options",
    [
        *((family, losses.Contrastive, {}) for family in FAMILIES),
        ("modernbert", losses.CachedContrastive, {"mini_batch_size": 4}),
        ("modernbert", losses.Distillation, {}),
    ],
)
def test_encoders(encoder, mode, family, loss_class, options):
    model = load_model(encoder(family)).double()
    loss_function = loss_class(model, **options)
    batch, labels = batch_of(model), None
    if loss_class is losses.Distillation:
        batch = features(model, sentences(4, longest=8), sentences(12, seed=1))
        labels = torch.rand(4, 3, dtype=torch.float64)
    stock = run(loss_function, batch, labels)
    with pylate_fastmaxsim.enabled(stock_masking=True):
        assert_equal(run(loss_function, batch, labels), stock)
        assert mode_of(model) == mode


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"size_average": False},
        {"temperature": 0.05},
        {"score_mini_batch_size": 4},
        {"score_mini_batch_size": 100},
        {"gather_across_devices": True},
    ],
    ids=str,
)
def test_contrastive_options(model, columns, options):
    loss_function = losses.Contrastive(model, **options)
    batch = batch_of(model, columns)
    stock = run(loss_function, batch)
    pylate_fastmaxsim.enable(stock_masking=True)
    assert_equal(run(loss_function, batch), stock)


@pytest.mark.parametrize(
    "options",
    [
        {"mini_batch_size": 1},
        {"mini_batch_size": 4, "size_average": False, "temperature": 0.05},
        {"mini_batch_size": 3, "score_mini_batch_size": 2},
        {"mini_batch_size": 100, "gather_across_devices": True},
    ],
    ids=str,
)
def test_cached_contrastive_options(model, mode, options):
    loss_function = losses.CachedContrastive(model, **options)
    batch = batch_of(model)
    stock = run(loss_function, batch)
    pylate_fastmaxsim.enable(stock_masking=True)
    assert_equal(run(loss_function, batch), stock)


@pytest.mark.parametrize("options", [{}, {"size_average": False}, {"normalize_scores": False}], ids=str)
def test_distillation_options(model, options):
    loss_function = losses.Distillation(model, **options)
    batch = features(model, sentences(4, longest=8), sentences(12, seed=1))
    labels = torch.rand(4, 3, dtype=torch.float64)
    stock = run(loss_function, batch, labels)
    pylate_fastmaxsim.enable(stock_masking=True)
    assert_equal(run(loss_function, batch, labels), stock)


@pytest.mark.parametrize("expansion", [{"do_query_expansion": False}, {"attend_to_expansion_tokens": True}], ids=str)
@pytest.mark.parametrize("loss_class", [losses.Contrastive, losses.CachedContrastive])
def test_query_expansion(encoder, loss_class, expansion):
    model = load_model(encoder("modernbert"), **expansion).double()
    loss_function = loss_class(model)
    batch = batch_of(model)
    stock = run(loss_function, batch)
    pylate_fastmaxsim.enable(stock_masking=True)
    assert_equal(run(loss_function, batch), stock)
    # A mask may hold numbers, of which PyLate looks only at which are 0.
    for column in batch:
        column["attention_mask"] = 2 * column["attention_mask"]
    assert_equal(run(loss_function, batch), stock)


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


@pytest.mark.parametrize("loss_class", [losses.Contrastive, losses.CachedContrastive, losses.Distillation])
def test_stock_masking_where_some_documents_have_no_masked_token(encoder, mode, loss_class):
    model = load_model(encoder("modernbert"), document_length=6).double()
    batch = batch_of(model, columns=1 if loss_class is losses.Distillation else 2, queries=12)
    labels = torch.rand(12, 1, dtype=torch.float64)
    full = torch.cat(losses.contrastive.extract_skiplist_mask(batch, model.skiplist)[1:]).all(dim=1)
    assert full.any() and not full.all()
    loss_function = loss_class(model, **({"normalize_scores": False} if loss_class is losses.Distillation else {}))
    if loss_class is losses.Distillation:
        batch[1] = {key: value[torch.randperm(12)].repeat(2, 1) for key, value in batch[1].items()}
        labels = torch.rand(12, 2, dtype=torch.float64)
    stock = run(loss_function, batch, labels)
    with pylate_fastmaxsim.enabled(stock_masking=True):
        assert_equal(run(loss_function, batch, labels), stock)
    with pylate_fastmaxsim.enabled():
        assert abs(run(loss_function, batch, labels)[0] - stock[0]) > 1e-6


@pytest.mark.parametrize("loss_class", [losses.Contrastive, losses.CachedContrastive])
def test_columns_of_their_own_length(model, mode, loss_class):
    # What a user gets who tokenizes without pad=True. Stock cannot stack these.
    short = model.tokenize(sentences(6, longest=6, seed=1), is_query=False)
    long = model.tokenize(sentences(6, longest=40, seed=2), is_query=False)
    assert short["input_ids"].shape[1] < long["input_ids"].shape[1]
    pad = long["input_ids"].shape[1] - short["input_ids"].shape[1]
    padded = {key: F.pad(value, (0, pad)) for key, value in short.items()}
    queries = batch_of(model)[0]
    loss_function = loss_class(model)
    stock = run(loss_function, [queries, padded, long])
    pylate_fastmaxsim.enable(stock_masking=True)
    assert_equal(run(loss_function, [queries, short, long]), stock)


def test_padding_stays_where_it_is_asked_for(model):
    loss_function = losses.Contrastive(model)
    batch = batch_of(model)
    stock = run(loss_function, batch)
    shapes = []
    model[0].register_forward_pre_hook(looking(lambda _module, args: shapes.append(args[0]["input_ids"].shape)))
    pylate_fastmaxsim.enable(padding_free=False, stock_masking=True)
    assert_equal(run(loss_function, batch), stock)
    assert shapes == [(6, 12), (6, 32), (6, 32)]


def test_loss_without_gradients(model, mode):
    batch = batch_of(model)
    for loss_function in (losses.Contrastive(model), losses.CachedContrastive(model, mini_batch_size=4)):
        with torch.no_grad():
            stock = loss_function(batch)
            with pylate_fastmaxsim.enabled(stock_masking=True):
                ours = loss_function(batch)
        assert ours.item() == pytest.approx(stock.item(), rel=1e-10) and not ours.requires_grad


def _sum_of_products(queries_embeddings, documents_embeddings, queries_mask=None, documents_mask=None):
    return torch.einsum("ash,bnth->abn", queries_embeddings, documents_embeddings).flatten(1)


class _OtherScores(scores.ColBERTScores):
    def __call__(self, *args, **kwargs):
        return 2 * super().__call__(*args, **kwargs)


class _OtherXTRScores(scores.XTRScores):
    def _score(self, *args):
        return 2 * super()._score(*args)


@pytest.mark.parametrize(
    "metric", [_sum_of_products, _OtherScores(), _OtherXTRScores(k=20)], ids=["own", "sub", "xtr-sub"]
)
@pytest.mark.parametrize("loss_class", [losses.Contrastive, losses.CachedContrastive])
def test_other_score_metrics_get_what_stock_gives_them(model, metric, loss_class, caplog):
    loss_function = loss_class(model, score_metric=metric)
    stock = run(loss_function, batch_of(model, collate=collated))
    with pylate_fastmaxsim.enabled(stock_masking=True), caplog.at_level(logging.WARNING, "pylate_fastmaxsim"):
        batch = batch_of(model, collate=collated)
        assert "token_total" in batch[1]
        for _ in range(2):
            assert_equal(run(loss_function, batch), stock)
    assert len([record for record in caplog.records if "score_metric" in record.message]) == 1


def test_a_loss_built_while_enabled_is_stock_again_afterwards(model):
    batch, labels = batch_of(model, columns=1), torch.rand(6, 1)
    for loss_class in (losses.Contrastive, losses.CachedContrastive, losses.Distillation):
        stock = run(loss_class(model), batch, labels)
        with pylate_fastmaxsim.enabled():
            loss_function = loss_class(model)
            run(loss_function, batch, labels)
        assert torch.equal(run(loss_function, batch, labels)[0], stock[0])


def test_distillation_without_labels_raises_as_stock_does(model):
    batch = batch_of(model, columns=1)
    for switch_on in (lambda: None, pylate_fastmaxsim.enable):
        switch_on()
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'labels'"):
            losses.Distillation(model)(batch)


def test_labels_by_name(model):
    batch, labels = batch_of(model, columns=1), torch.rand(6, 1, dtype=torch.float64)
    for loss_class in (losses.Contrastive, losses.Distillation):
        stock = loss_class(model)([dict(column) for column in batch], labels=labels)
        with pylate_fastmaxsim.enabled(stock_masking=True):
            ours = loss_class(model)(sentence_features=[dict(column) for column in batch], labels=labels)
        torch.testing.assert_close(ours, stock)


@pytest.mark.parametrize("columns", [0, 1])
@pytest.mark.parametrize("loss_class", [losses.Contrastive, losses.CachedContrastive, losses.Distillation])
def test_queries_without_documents_are_refused_in_one_sentence(model, loss_class, columns):
    pylate_fastmaxsim.enable()
    with pytest.raises(
        ValueError,
        match=f"^{loss_class.__name__}: sentence_features must hold the column of the queries and at least one of "
        f"documents, got {columns} in all.$",
    ):
        loss_class(model)(batch_of(model)[:columns], torch.rand(6, 1))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("loss_class", [losses.Contrastive, losses.CachedContrastive])
def test_gradient_checkpointing(encoder, mode, loss_class, reentrant):
    model = load_model(encoder("modernbert")).double()
    loss_function = loss_class(model)
    batch = batch_of(model)
    stock = run(loss_function, batch)
    model[0].auto_model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model[0].auto_model.enable_input_require_grads()
    pylate_fastmaxsim.enable(stock_masking=True)
    assert_equal(run(loss_function, batch), stock)


@pytest.mark.parametrize("wrapped", [True, False], ids=["get_peft_model", "add_adapter"])
def test_lora(encoder, mode, wrapped):
    model = load_model(encoder("bert")).double()
    config = LoraConfig(task_type=TaskType.FEATURE_EXTRACTION, r=4, target_modules=["query", "value"], lora_dropout=0.0)
    if wrapped:
        model[0].auto_model = get_peft_model(model[0].auto_model, config)
    else:
        model.add_adapter(config)
    model.double().train()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1)
    loss_function = losses.Contrastive(model)
    batch = batch_of(model)
    stock = run(loss_function, batch)
    assert any("lora" in name for name in stock[1]) and not any("word_embed" in name for name in stock[1])
    pylate_fastmaxsim.enable(stock_masking=True)
    assert_equal(run(loss_function, batch), stock)
    assert mode_of(model) == mode


def test_virtual_tokens_of_peft_that_come_after_the_first_batch(encoder, mode):
    """Of stock's losses, CachedContrastive takes prefix tuning."""
    model = load_model(encoder("bert")).double()
    loss_function, batch = losses.CachedContrastive(model), batch_of(model)
    pylate_fastmaxsim.enable(stock_masking=True)
    run(loss_function, batch)
    prefix = PrefixTuningConfig(task_type=TaskType.FEATURE_EXTRACTION, num_virtual_tokens=3)
    model[0].auto_model = get_peft_model(model[0].auto_model, prefix).double()
    ours = run(loss_function, batch)
    pylate_fastmaxsim.disable()
    assert_equal(ours, run(loss_function, batch))


@pytest.mark.compile
def test_model_compiled_by_its_user(encoder, mode):
    model = load_model(encoder("modernbert", num_hidden_layers=1))
    batch = batch_of(model)
    stock = run(losses.Contrastive(model), batch)
    compiled = torch.compile(model, backend="aot_eager")
    with pylate_fastmaxsim.enabled(stock_masking=True, compile=True):
        assert_equal(run(losses.Contrastive(compiled), batch), stock, 1e-4)
        assert mode_of(model) == mode
    torch._dynamo.reset()


def test_float32(encoder, mode):
    model = load_model(encoder("bert"))
    loss_function = losses.Contrastive(model)
    batch = batch_of(model)
    stock = run(loss_function, batch)
    pylate_fastmaxsim.enable(stock_masking=True)
    assert_equal(run(loss_function, batch), stock, 1e-5)


@pytest.mark.parametrize("loss_class", [losses.Contrastive, losses.CachedContrastive])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(encoder, mode, loss_class, dtype):
    model = load_model(encoder("modernbert"))
    loss_function = loss_class(model)
    batch = batch_of(model)
    with torch.autocast("cpu", dtype):
        stock = run(loss_function, batch)
        with pylate_fastmaxsim.enabled(stock_masking=True):
            ours = run(loss_function, batch)
    assert ours[0].dtype == torch.float32
    assert ours[0] == pytest.approx(stock[0].item(), rel=0.03)
    total = torch.cat([gradient.flatten() for gradient in stock[1].values()])
    difference = torch.cat([ours[1][name].flatten() for name in stock[1]]) - total
    assert difference.norm() < 0.15 * total.norm()
