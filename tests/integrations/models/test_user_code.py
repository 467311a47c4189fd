"""A model with modules or hooks of the user's own is encoded as stock PyLate does, unless said to treat texts apart."""

from __future__ import annotations

from types import FunctionType, MethodType

import pytest
import torch
from pylate import losses
from torch import nn
from transformers.models.bert.modeling_bert import BertOutput

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.encoding.token_counts import without_total
from tests.support.compared import assert_as_stock, assert_equal, run
from tests.support.encoded import batch_of, mode_of
from tests.support.models import Behind, collated, features, load_model

ADVICE = "and may not treat each text by itself"


def centred(output):
    return output - output.mean(dim=(0, 1))


class Centred(Behind):
    """Only in training, so that no trial finds it."""

    def change(self, features):
        embeddings = features["token_embeddings"]
        return {**features, "token_embeddings": centred(embeddings) if self.training else embeddings}


class Tokenwise(Behind):
    def change(self, features):
        features["term"] = features["token_embeddings"].square().mean()
        return {**features, "token_embeddings": features["token_embeddings"].tanh()}


def written_in(library, function):
    return FunctionType(function.__code__, {"__name__": library})


def _output(model) -> nn.Module:
    """A module inside of the last layer of a BERT."""
    return model[0].auto_model.encoder.layer[-1].output


def _behind(model):
    model[1] = Centred(model[1])


def _hook(model):
    _output(model).register_forward_hook(lambda _module, _args, output: centred(output))


def _backward_hook(model):
    decorated = torch.no_grad()(lambda _module, given, _: tuple(each / each.norm() for each in given))
    _output(model).register_full_backward_hook(decorated)


def _forward(model):
    forward = _output(model).forward
    _output(model).forward = lambda *args: centred(forward(*args))


@pytest.mark.parametrize(
    "add, said",
    [
        (_behind, "Centred is a module of your own"),
        (_forward, "the forward of BertOutput is a function of your own"),
        (_hook, "a hook of your own is on BertOutput"),
        (_backward_hook, "a hook of your own is on BertOutput"),
    ],
)
def test_steps_are_those_of_stock(encoder, caplog, add, said):
    model = load_model(encoder("bert")).double()
    add(model)
    assert_as_stock(losses.CachedContrastive(model), batch_of(model, collate=features))
    assert mode_of(model) == {"padded"}
    assert f"{said}, {ADVICE}" in caplog.text


def test_activations_that_are_functions_of_pytorch_are_not_of_ones_own(encoder, mode):
    model = load_model(encoder("bert")).double()
    del model[1].activation_function
    model[1].activation_function = torch.tanh
    assert_as_stock(losses.Contrastive(model), batch_of(model, collate=features))
    assert mode_of(model) == {mode}


def test_what_is_said_to_treat_each_text_by_itself_is_encoded_without_padding(encoder, mode):
    model = load_model(encoder("bert")).double()
    model[1] = Tokenwise(model[1])
    assert_as_stock(losses.CachedContrastive(model), batch_of(model, collate=features), padding_free="always")
    assert mode_of(model) == {mode}


def test_what_is_said_and_shows_at_once_to_be_otherwise_is_padded(encoder, caplog):
    model = load_model(encoder("bert")).double()
    _hook(model)
    assert_as_stock(losses.Contrastive(model), batch_of(model, collate=features), padding_free="always")
    assert "BertModel gives other token embeddings without padding than with it" in caplog.text


def test_a_change_counts_from_the_next_batch_on(encoder, mode, monkeypatch):
    model = load_model(encoder("bert")).double()
    loss_function, batch = losses.Contrastive(model), batch_of(model, collate=features)
    forward = BertOutput.forward
    pylate_fastmaxsim.enable(stock_masking=True)
    run(loss_function, batch)
    assert mode_of(model) == {mode}
    monkeypatch.setattr(BertOutput, "forward", lambda self, *args: centred(forward(self, *args)))
    ours = run(loss_function, batch)
    assert mode_of(model) == {mode, "padded"}
    pylate_fastmaxsim.disable()
    assert_equal(ours, run(loss_function, batch))


def test_what_a_module_leaves_in_the_features_is_there_for_a_loss_built_on_another(encoder):
    class Regularised(losses.Contrastive):
        def forward(self, sentence_features, labels=None):
            return super().forward(sentence_features, labels) + sum(column["term"] for column in sentence_features)

    model = load_model(encoder("bert")).double()
    model[1] = Tokenwise(model[1])
    loss_function, batch = Regularised(model), batch_of(model, collate=collated)
    stock = run(loss_function, [without_total(column) for column in batch])
    pylate_fastmaxsim.enable(stock_masking=True)
    assert_equal(run(loss_function, batch), stock)


@pytest.mark.parametrize("reentrant", [False, True])
def test_hooks_on_weights_see_the_gradients_that_stock_gives_them(encoder, mode, caplog, reentrant):
    model = load_model(encoder("bert")).double()
    for weight in model.parameters():
        weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    if reentrant:  # each layer's call has a backward of its own
        model[0].auto_model.gradient_checkpointing_enable({"use_reentrant": True})
        model[0].auto_model.enable_input_require_grads()
    batch = batch_of(model, collate=features)
    for loss, expected in ((losses.Contrastive, "padded" if reentrant else mode), (losses.CachedContrastive, "padded")):
        stock = run(loss(model), batch)
        with pylate_fastmaxsim.enabled(stock_masking=True):
            assert_equal(run(loss(model), batch), stock)
            assert mode_of(model) == {expected}
    assert "a hook of your own is on the gradient of 0.auto_model.embeddings.word_embeddings.weight" in caplog.text


def test_what_libraries_add_is_not_the_users_own(encoder, mode):
    from peft import LoraConfig, TaskType

    model = load_model(encoder("bert"))
    model[0].auto_model.add_adapter(LoraConfig(task_type=TaskType.FEATURE_EXTRACTION, target_modules=["query"]))
    nn.utils.parametrizations.weight_norm(model[1].linear)
    # As Liger replaces the forward of modules that exist, and as wandb.watch puts hooks on modules and weights.
    forward = written_in("liger_kernel", lambda self, hidden: type(self).forward(self, hidden))
    _output(model).LayerNorm.forward = MethodType(forward, _output(model).LayerNorm)
    watch = written_in("wandb", lambda *_: None)
    handles = [module.register_forward_hook(watch) for module in model.modules()]
    handles += [weight.register_hook(watch) for weight in model.parameters() if weight.requires_grad]
    pylate_fastmaxsim.enable()
    try:
        run(losses.CachedContrastive(model), batch_of(model, collate=features))
    finally:
        for handle in handles:  # models share the default activation of PyLate's Dense
            handle.remove()
    assert mode_of(model) == {mode}
