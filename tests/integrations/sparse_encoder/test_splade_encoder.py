"""Embeddings and losses of SPLADE models without vocabulary logits, beside what tests of all hosts compare."""

import pytest
import torch

pytest.importorskip("sentence_transformers", minversion="5.1", reason="no SPLADE by the flag before it")

from accelerate.utils import send_to_device
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from sentence_transformers.sparse_encoder import losses

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.sparse_encoder import encoder as sparse_encoder
from tests.support.sparse_encoders import FAMILIES, autoencoder, inference_free, splade, transformer_of
from tests.support.splade_steps import CACHED, CONTRASTIVE, HOST, TEXTS, Step, batch_of, step_of, watch_decoder


@pytest.mark.parametrize("padding_free", [True, False])
def test_the_other_activation_function_with_padding_and_without(encoder, packed, monkeypatch, padding_free):
    model = splade(encoder("bert", masked_lm=True), activation_function="log1p_relu")
    HOST.assert_as_stock(model, step_of(model), monkeypatch, padding_free=padding_free)
    assert HOST.modes(model) == ({"packed"} if padding_free else set())


@pytest.mark.parametrize("family", FAMILIES)
def test_encoded_texts_are_those_of_stock(encoder, monkeypatch, family):
    model = splade(encoder(family, masked_lm=True))
    texts = [*TEXTS[3], ""]
    options = [{}, {"max_active_dims": 5}, {"convert_to_sparse_tensor": False, "batch_size": 2}]
    stock = [model.encode(texts, show_progress_bar=False, **each) for each in options]
    pylate_fastmaxsim.enable()
    model.encode(texts[:1])
    decoded = watch_decoder(model, monkeypatch)
    ours = [model.encode(texts, show_progress_bar=False, **each) for each in options]
    for own, expected in zip(ours, stock, strict=True):
        assert (own.layout, own.dtype, own.shape) == (expected.layout, expected.dtype, expected.shape)
        torch.testing.assert_close(own.to_dense(), expected.to_dense())
    # Texts of similar length need no check of how to leave padding out.
    assert not decoded and not HOST.modes(model)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None])
def test_dtypes_are_those_of_stock(model, training, dtype, device):
    """``None``: under autocast, by which a GPU takes logarithms in float32 in training, and in place in evaluation."""
    model.to(device, dtype or torch.float32).train(training)
    features = send_to_device(batch_of(model, 2)[1], device)

    def embeddings() -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=dtype is None):
            return model(dict(features))["sentence_embedding"]

    stock = embeddings()
    pylate_fastmaxsim.enable()
    ours = embeddings()
    assert ours.dtype == stock.dtype
    torch.testing.assert_close(ours, stock, rtol=0.05, atol=0.05)


def test_the_output_has_no_logits(model):
    features, pooling = batch_of(model, 2)[1], model[1]
    dimensions = [name for name in ("embedding_dimension", "word_embedding_dimension") if hasattr(pooling, name)]
    pylate_fastmaxsim.enable()
    for name in dimensions:
        setattr(pooling, name, None)
    assert model(dict(features)).keys() == {*features, "sentence_embedding"}
    assert {getattr(pooling, name) for name in dimensions} == {transformer_of(model).auto_model.config.vocab_size}


def test_texts_with_gaps_and_without_tokens(model, packed, monkeypatch, caplog):
    step = step_of(model)
    step.batch[1]["attention_mask"][0, 1] = 0
    step.batch[2]["attention_mask"][1] = 0
    HOST.assert_as_stock(model, step, monkeypatch)
    assert "Texts are encoded with padding, as stock Sentence Transformers does: one has a gap" in caplog.text


@pytest.mark.parametrize("wrapped", [False, True])
def test_adapters_in_the_encoder(model, mode, monkeypatch, wrapped):
    torch.manual_seed(0)
    config, transformer = LoraConfig(target_modules=["query", "transform.dense"], init_lora_weights=False), model[0]
    if wrapped:
        (name,) = {"model", "auto_model"} & transformer._modules.keys()
        setattr(transformer, name, get_peft_model(transformer.auto_model, config))
    else:
        inject_adapter_in_model(config, transformer.auto_model)
    model.double()
    HOST.assert_as_stock(model, step_of(model), monkeypatch)
    assert HOST.modes(model) == {mode}


@pytest.mark.parametrize("options", [{"query_regularizer_weight": None}, CACHED], ids=["contrastive", "cached"])
def test_queries_without_an_encoder(encoder, mode, monkeypatch, caplog, options):
    model = inference_free(encoder("distilbert", masked_lm=True))
    HOST.assert_as_stock(model, step_of(model, **options), monkeypatch)
    assert HOST.modes(model) == {mode} and "stock" not in caplog.text


def test_a_hook_in_the_encoder_keeps_the_padding(model, packed, monkeypatch, caplog):
    calls = []
    transformer_of(model).auto_model.bert.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    HOST.assert_as_stock(model, step_of(model), monkeypatch)
    assert calls and all(calls), "a trial has called a hook, which may collect a penalty"
    assert HOST.modes(model) == {"padded"}
    assert "with padding, as stock Sentence Transformers does: a hook of your own is on BertModel" in caplog.text


def test_few_tokens_on_a_cpu_are_left_to_stock(model, monkeypatch, caplog):
    step, decoded = step_of(model, columns=2), watch_decoder(model, monkeypatch)
    widths = [column["input_ids"].numel() for column in step.batch]
    monkeypatch.setattr(sparse_encoder, "FEW_TOKENS", widths[1])
    pylate_fastmaxsim.enable()
    step.run()
    decoded.clear()
    step.run()
    assert decoded == widths[:1] and "stock" not in caplog.text


def test_models_without_vocabulary_logits_are_left_alone_in_silence(encoder, caplog):
    model = autoencoder(encoder("bert"))
    step = Step(losses.CSRLoss(model, CONTRASTIVE(model)), batch_of(model))
    stock = step.run()
    pylate_fastmaxsim.enable()
    step.assert_equal(step.run(), stock)
    assert "logits" not in caplog.text and "padding" not in caplog.text
