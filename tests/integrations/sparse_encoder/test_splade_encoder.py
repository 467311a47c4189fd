"""Embeddings of a SPLADE model without vocabulary logits, against stock."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("sentence_transformers", minversion="5.1", reason="no SPLADE by the flag before it")

from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from sentence_transformers import SparseEncoder
from sentence_transformers.sparse_encoder import losses

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.sparse_encoder import encoder as sparse_encoder
from tests.support.sparse_encoders import (
    FAMILIES,
    Router,
    SpladePooling,
    inference_free,
    masked_lm,
    splade,
    transformer_of,
)
from tests.support.splade_steps import TEXTS, Decoded, assert_as_stock, batch_of, modes, run, splade_loss


@pytest.fixture
def model(encoder) -> SparseEncoder:
    return splade(encoder("bert", masked_lm=True))


def loss_of(model):
    return splade_loss(model, losses.SparseMultipleNegativesRankingLoss)


def assert_step_as_stock(model, monkeypatch, batch=None, **options) -> None:
    """And it stays on."""
    batch = batch_of(model, 3) if batch is None else batch
    assert_as_stock(model, Decoded.of(model, monkeypatch), {"contrastive": (loss_of(model), batch)}, **options)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
def test_steps_are_those_of_stock(encoder, mode, monkeypatch, family, activation):
    model = splade(encoder(family, masked_lm=True), activation_function=activation)
    assert_step_as_stock(model, monkeypatch)
    assert modes(model) == {mode}


@pytest.mark.parametrize("family", FAMILIES)
def test_encoded_texts_are_those_of_stock(encoder, monkeypatch, family):
    model = splade(encoder(family, masked_lm=True))
    texts = [*TEXTS[3], ""]
    options = [{}, {"max_active_dims": 5}, {"convert_to_sparse_tensor": False, "batch_size": 2}]
    stock = [model.encode(texts, show_progress_bar=False, **each) for each in options]
    pylate_fastmaxsim.enable()
    model.encode(texts[:1])
    decoded = Decoded.of(model, monkeypatch)
    ours = [model.encode(texts, show_progress_bar=False, **each) for each in options]
    for own, expected in zip(ours, stock, strict=True):
        assert (own.layout, own.dtype, own.shape) == (expected.layout, expected.dtype, expected.shape)
        torch.testing.assert_close(own.to_dense(), expected.to_dense())
    assert not decoded.tokens
    # Texts of similar length need no check of how to leave padding out.
    assert not modes(model)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None])
def test_dtypes_are_those_of_stock(model, training, dtype):
    """``None``: under autocast."""
    model.to(dtype or torch.float32).train(training)
    features = batch_of(model, 2)[1]

    def embeddings() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is None):
            return model(dict(features))["sentence_embedding"]

    stock = embeddings()
    pylate_fastmaxsim.enable()
    ours = embeddings()
    assert ours.dtype == stock.dtype
    torch.testing.assert_close(ours, stock, rtol=0.05, atol=0.05)


def test_the_output_has_no_logits(model):
    features = batch_of(model, 2)[1]
    pooling = model[1]
    dimensions = [name for name in ("embedding_dimension", "word_embedding_dimension") if hasattr(pooling, name)]
    pylate_fastmaxsim.enable()
    for name in dimensions:
        setattr(pooling, name, None)
    assert model(dict(features)).keys() == {*features, "sentence_embedding"}
    assert {getattr(pooling, name) for name in dimensions} == {transformer_of(model).auto_model.config.vocab_size}


def test_texts_with_gaps_and_without_tokens(model, packed, monkeypatch, caplog):
    batch = batch_of(model, 3)
    batch[1]["attention_mask"][0, 1] = 0
    batch[2]["attention_mask"][1] = 0
    assert_step_as_stock(model, monkeypatch, batch)
    assert "Texts are encoded with padding, as stock Sentence Transformers does: one has a gap" in caplog.text


def test_with_padding(model, monkeypatch):
    assert_step_as_stock(model, monkeypatch, padding_free=False)
    assert not modes(model)


def wrap_masked_lm(model, wrap) -> None:
    (name,) = {"model", "auto_model"} & transformer_of(model)._modules.keys()
    setattr(transformer_of(model), name, wrap(transformer_of(model).auto_model))


@pytest.mark.parametrize("wrapped", [False, True])
def test_adapters_in_the_encoder(model, mode, monkeypatch, wrapped):
    torch.manual_seed(0)
    config = LoraConfig(target_modules=["query", "transform.dense"], init_lora_weights=False)
    if wrapped:
        wrap_masked_lm(model, lambda masked: get_peft_model(masked, config))
    else:
        inject_adapter_in_model(config, transformer_of(model).auto_model)
    model.double()
    assert_step_as_stock(model, monkeypatch)
    assert modes(model) == {mode}


def test_documents_beside_queries_without_an_encoder(encoder, mode, monkeypatch, caplog):
    model = inference_free(encoder("bert", masked_lm=True))
    assert_step_as_stock(model, monkeypatch)
    assert modes(model) == {mode}
    assert "stock" not in caplog.text


def test_one_encoder_in_two_routes(encoder, mode, monkeypatch):
    transformer = masked_lm(encoder("bert", masked_lm=True))
    routes = [[transformer], [transformer]]
    model = SparseEncoder(modules=[Router.for_query_document(*routes), SpladePooling()], device="cpu").double().train()
    assert_step_as_stock(model, monkeypatch)
    assert modes(model) == {mode}


def test_a_hook_in_the_encoder_keeps_the_padding(model, packed, monkeypatch, caplog):
    calls = []
    transformer_of(model).auto_model.bert.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    assert_step_as_stock(model, monkeypatch)
    assert calls and all(calls), "a trial has called a hook, which may collect a penalty"
    assert modes(model) == {"padded"}
    assert "with padding, as stock Sentence Transformers does: a hook of your own is on BertModel" in caplog.text


def test_few_tokens_on_a_cpu_are_left_to_stock(model, monkeypatch, caplog):
    batch = batch_of(model, 2)
    decoded = Decoded.of(model, monkeypatch)
    widths = [column["input_ids"].numel() for column in batch]
    monkeypatch.setattr(sparse_encoder, "FEW_TOKENS", widths[1])
    pylate_fastmaxsim.enable()
    run(model, loss_of(model), batch)
    decoded.tokens.clear()
    run(model, loss_of(model), batch)
    assert decoded.tokens == widths[:1]
    assert "stock" not in caplog.text
