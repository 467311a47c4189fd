"""SPLADE models, or parts of them, that are left to stock: with a line of log, and with stock's values."""

import copy
import logging

import pytest
import torch

pytest.importorskip("sentence_transformers", minversion="5.1", reason="no SPLADE by the flag before it")

from peft import LoraConfig, inject_adapter_in_model
from sentence_transformers import SparseEncoder
from torch import nn
from transformers import BertForMaskedLM, EsmConfig, EsmForMaskedLM, MobileBertConfig, MobileBertForMaskedLM
from transformers.models.bert.modeling_bert import BertLMPredictionHead

import pylate_fastmaxsim
from tests.support.edited import edited
from tests.support.sparse_encoders import Router, SpladePooling, masked_lm, transformer_of
from tests.support.splade_steps import Step, batch_of, splade_loss, step_of

STOCK = "Vocabulary logits are computed for every token, as stock Sentence Transformers does: "


class ReadsLogits(nn.Module):
    def forward(self, features: dict) -> dict:
        logits = features["token_embeddings"].mean(dim=1)
        return {**features, "sentence_embedding": features["sentence_embedding"] + logits}


class OwnPooling(SpladePooling):
    def forward(self, features: dict) -> dict:
        return {**features, "sentence_embedding": features["token_embeddings"].relu().mean(dim=1)}


class OwnBert(BertForMaskedLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 0.5
        return output


def mlm(model) -> nn.Module:
    return transformer_of(model).auto_model


def set_mlm(model, masked: nn.Module) -> None:
    (name,) = {"model", "auto_model"} & transformer_of(model)._modules.keys()
    setattr(transformer_of(model), name, masked.double().train())


def other_architecture(kind, config, **sizes):
    def change(model) -> None:
        torch.manual_seed(0)
        vocabulary = mlm(model).config.vocab_size
        common = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_dropout_prob": 0.0}
        set_mlm(model, kind(config(vocab_size=vocabulary, attention_probs_dropout_prob=0.0, **common, **sizes)))

    return change


def adapter_on_the_decoder(model) -> None:
    inject_adapter_in_model(LoraConfig(target_modules=["decoder"], init_lora_weights=False), mlm(model))
    model.double()


def hook_inside(model) -> None:
    dense = mlm(model).cls.predictions.transform.dense
    dense.register_forward_hook(lambda _module, _args, output: output - output.mean(dim=-2, keepdim=True))


def replace_forward(module: nn.Module) -> None:
    forward = module.forward
    module.forward = lambda *args, **kwargs: forward(*args, **kwargs)


HOOK = "a hook or another forward is on "
SMALL = {"hidden_size": 32, "intermediate_size": 32}
PARTS = {**SMALL, "embedding_size": 16, "intra_bottleneck_size": 16}
ESM = other_architecture(EsmForMaskedLM, EsmConfig, **SMALL, pad_token_id=0)
MOBILE_BERT = other_architecture(MobileBertForMaskedLM, MobileBertConfig, **PARTS)
# What is changed, and the line of log.
CASES = {
    "sum": (lambda m: setattr(m[1], "pooling_strategy", "sum"), 'SpladePooling has pooling_strategy="sum"'),
    "module between": (lambda m: m.insert(1, nn.Identity()), "Identity follows the encoder, not SpladePooling"),
    "own pooling": (lambda m: m.__setitem__(1, OwnPooling()), "OwnPooling has a forward of its own"),
    "module behind": (lambda m: m.append(ReadsLogits()), "ReadsLogits may read them"),
    "own language model": (lambda m: setattr(mlm(m), "__class__", OwnBert), "OwnBert has no head that is known"),
    "hook on the model": (lambda m: m.register_forward_hook(lambda *_: None), HOOK + "SparseEncoder"),
    "hook on the pooling": (lambda m: m[1].register_forward_pre_hook(lambda *_: None), HOOK + "SpladePooling"),
    "hook on the head": (lambda m: mlm(m).cls.register_forward_hook(lambda *_: None), HOOK + "BertOnlyMLMHead"),
    "hook inside the head": (hook_inside, "a hook of your own is on Linear"),
    "forward of the decoder": (lambda m: replace_forward(mlm(m).cls.predictions.decoder), HOOK + "Linear"),
    "adapter on the decoder": (adapter_on_the_decoder, "the decoder of BertForMaskedLM is a peft.tuners.lora.layer"),
    "a bias behind the decoder": (ESM, "EsmForMaskedLM gives other logits than its parts"),
    "a decoder in parts": (MOBILE_BERT, "MobileBertForMaskedLM cannot run in parts (RuntimeError"),
    "FSDP": (lambda m: setattr(mlm(m).cls, "_is_fsdp_managed_module", True), "FSDP divides the weights of"),
    "DataParallel": (lambda m: setattr(m[0], "_is_replica", True), "DataParallel copies the model in every step"),
    "hidden states": (lambda m: setattr(mlm(m).config, "output_hidden_states", True), "it returns the hidden states"),
}


@pytest.mark.parametrize(("change", "line"), CASES.values(), ids=CASES)
def test_what_is_left_to_stock(model, caplog, change, line):
    change(model)
    step, texts = step_of(model, columns=2), ["flowers and bees", "rivers"]
    stock, encoded = step.run(), model.encode(texts, show_progress_bar=False)
    model.train()
    pylate_fastmaxsim.enable()
    step.assert_equal(step.run(), stock)
    torch.testing.assert_close(model.encode(texts, show_progress_bar=False).to_dense(), encoded.to_dense())
    lines = [record.message for record in caplog.records if record.message.startswith(STOCK)]
    assert len(lines) == 1 and line in lines[0]


def assert_left_to_stock(step: Step, caplog, line: str) -> None:
    stock = step.run()
    pylate_fastmaxsim.enable()
    step.assert_equal(step.run(), stock)
    assert STOCK + line in caplog.text


def test_a_hook_on_routes_sees_logits(model, caplog):
    routes = Router.for_query_document([model[0]], [model[0]], default_route="document")
    routed = SparseEncoder(modules=[routes, model[1]], device="cpu").train()
    batch = [{**column, "task": task} for column, task in zip(batch_of(model, 2), ("query", "document"), strict=True)]
    routes.register_forward_hook(lambda _, args, out: {**out, "token_embeddings": 2 * out["token_embeddings"]})
    assert_left_to_stock(Step(splade_loss(routed), batch), caplog, "a hook or another forward is on Router")


def test_two_poolings_of_one_encoder(encoder, caplog):
    transformer = masked_lm(encoder("bert", masked_lm=True))
    routes = [[transformer, SpladePooling(strategy)] for strategy in ("max", "sum")]
    model = SparseEncoder(modules=[Router.for_query_document(*routes)], device="cpu").double().train()
    assert_left_to_stock(step_of(model, columns=2), caplog, "no one module follows the encoder, not SpladePooling")


def change_class(monkeypatch, model) -> None:
    forward = BertLMPredictionHead.forward
    monkeypatch.setattr(BertLMPredictionHead, "forward", lambda self, hidden: forward(self, hidden) * 0.5)


def hook_all_modules(monkeypatch, model) -> None:
    decoder = mlm(model).cls.predictions.decoder

    def halve(module: nn.Module, _args: tuple, output: object) -> object:
        return output * 0.5 if module is decoder else None

    monkeypatch.setitem(nn.modules.module._global_forward_hooks, -1, halve)


@pytest.mark.parametrize("change", [change_class, hook_all_modules])
def test_what_comes_after_the_check_by_numbers(model, monkeypatch, change):
    step = step_of(model, columns=2)
    with pylate_fastmaxsim.enabled():
        before = step.run()
        change(monkeypatch, model)
        ours = step.run()
    stock = step.run()
    step.assert_equal(ours, stock)
    assert stock[0] != before[0]


class Exported:
    def __init__(self, model: nn.Module) -> None:
        self.model, self.config = model, model.config

    def forward(self, **features: torch.Tensor) -> object:
        return self.model(**features)

    __call__ = forward


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.compile)])
def test_an_exported_model_is_left_to_stock(model, caplog, compiled):
    features, transformer = batch_of(model, 2)[1], transformer_of(model)
    (name,) = {"model", "auto_model"} & transformer._modules.keys()
    exported = Exported(transformer._modules.pop(name))
    object.__setattr__(transformer, name, exported)
    stock = model(dict(features))["sentence_embedding"]
    pylate_fastmaxsim.enable(compile=compiled)
    torch.testing.assert_close(model(dict(features))["sentence_embedding"], stock, rtol=0, atol=0)
    assert STOCK + "Exported is no module of PyTorch" in caplog.text


def test_an_edited_pooling_is_left_to_stock(model, monkeypatch, caplog):
    monkeypatch.setattr(SpladePooling, "forward", edited(SpladePooling.forward, ".relu_()", ".relu_().mul(2)"))
    features = batch_of(model, 2)[1]
    stock = model(dict(features))["sentence_embedding"]
    caplog.set_level(logging.INFO, "pylate_fastmaxsim")
    pylate_fastmaxsim.enable()
    torch.testing.assert_close(model(dict(features))["sentence_embedding"], stock, rtol=0, atol=0)
    assert "SpladePooling.forward is not accelerated" in caplog.text
    assert "SpladePooling.forward is not the code of a release" in caplog.text
    # The line that sums up says what is left of it.
    assert "exact search of sparse embeddings (but not " in caplog.text and "SPLADE without" not in caplog.text
    pylate_fastmaxsim.disable()
    caplog.clear()
    monkeypatch.undo()
    pylate_fastmaxsim.enable()
    assert "SPLADE without vocabulary logits, exact search of sparse embeddings; " in caplog.text


def test_a_copy_and_its_original_are_independent(model):
    features = batch_of(model, 2)[1]
    pylate_fastmaxsim.enable()
    first = model(dict(features))["sentence_embedding"]
    other = copy.deepcopy(model)
    with torch.no_grad():
        mlm(other).cls.predictions.decoder.weight.mul_(2)
    changed = other(dict(features))["sentence_embedding"]
    torch.testing.assert_close(model(dict(features))["sentence_embedding"], first)
    pylate_fastmaxsim.disable()
    torch.testing.assert_close(other(dict(features))["sentence_embedding"], changed)
