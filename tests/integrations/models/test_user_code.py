"""Modules and hooks of somebody's own keep the calls of stock PyLate, unless said to treat each text by itself."""

from __future__ import annotations

import types

import pytest
import torch
from models import collated, features, load_model
from pylate import losses
from test_encode import batch_of, mode_of
from test_pylate_losses import assert_equal, run
from torch import nn
from torch.optim.swa_utils import AveragedModel
from transformers.models.bert.modeling_bert import BertLayer, BertOutput
from user_modules import ADDED, Leaving, Tokenwise, output_of_last_layer

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.encoding.token_counts import without_total
from pylate_fastmaxsim.integrations.models.user_code import own_code

ADVICE = 'and may not treat each text by itself (if it does, switch on with padding_free="always")'
LOSSES = [losses.Contrastive, losses.CachedContrastive]


def state_of(model):
    """All that a model holds beside hooks, with lists and dictionaries of numbers as tensors."""
    plain = {
        f"{name}.{key}": torch.tensor(value["square"] if isinstance(value, dict) else value)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if key in ("calls", "terms", "seen", "merged", "training")
    }
    return {name: value.clone() for name, value in model.state_dict().items()} | plain


@pytest.mark.parametrize("added", ADDED)
@pytest.mark.parametrize("loss_class", LOSSES)
def test_steps_are_those_of_stock(encoder, mode, caplog, added, loss_class):
    add, said = ADDED[added]

    def steps():
        model = load_model(encoder("bert")).double()
        torch.manual_seed(0)
        add(model)
        model.train()
        loss_function = loss_class(model)
        results = [run(loss_function, batch_of(model, seed=seed, collate=features)) for seed in (0, 3)]
        return model, results

    stock_model, stock = steps()
    pylate_fastmaxsim.enable(stock_masking=True)
    model, ours = steps()
    for one, other in zip(ours, stock, strict=True):
        assert one[1].keys() == other[1].keys()
        assert_equal(one, other)
    torch.testing.assert_close(state_of(model), state_of(stock_model))
    assert mode_of(model) == {"padded"}
    assert f"with padding, as stock PyLate does: {said}, {ADVICE}." in caplog.text


@pytest.mark.parametrize("loss_class", LOSSES)
def test_what_is_said_to_treat_each_text_by_itself_is_encoded_without_padding(encoder, mode, loss_class):
    model = load_model(encoder("bert")).double()
    model[1] = Tokenwise(model[1])
    loss_function, batch = loss_class(model), batch_of(model, collate=features)
    stock = run(loss_function, batch)
    pylate_fastmaxsim.enable(stock_masking=True, padding_free="always")
    assert_equal(run(loss_function, batch), stock)
    assert mode_of(model) == {mode}
    pylate_fastmaxsim.enable(stock_masking=True)
    assert_equal(run(loss_function, batch), stock)
    assert mode_of(model) == {"padded"}


def test_what_is_said_and_shows_at_once_to_be_otherwise_is_padded(encoder, mode, caplog):
    model = load_model(encoder("bert")).double()
    ADDED["hook"][0](model)
    loss_function, batch = losses.Contrastive(model), batch_of(model, collate=features)
    stock = run(loss_function, batch)
    pylate_fastmaxsim.enable(stock_masking=True, padding_free="always")
    assert_equal(run(loss_function, batch), stock)
    assert "BertModel gives other token embeddings without padding than with it" in caplog.text


def test_a_hook_counts_from_the_batch_after_it_is_there_until_it_is_gone(encoder, mode):
    model = load_model(encoder("bert")).double()
    loss_function, batch = losses.Contrastive(model), batch_of(model, collate=features)
    plain = run(loss_function, batch)
    hook = output_of_last_layer(model).register_forward_hook(lambda _module, _args, output: output - output.mean())
    stock = run(loss_function, batch)
    hook.remove()
    pylate_fastmaxsim.enable(stock_masking=True)
    assert_equal(run(loss_function, batch), plain)
    assert mode_of(model) == {mode}
    hook = output_of_last_layer(model).register_forward_hook(lambda _module, _args, output: output - output.mean())
    assert_equal(run(loss_function, batch), stock)
    assert mode_of(model) == {mode, "padded"}
    hook.remove()
    assert_equal(run(loss_function, batch), plain)


@pytest.mark.parametrize("kind, name", [(BertOutput, "forward"), (BertLayer, "feed_forward_chunk")])
def test_a_method_of_a_class_that_is_replaced_between_batches(encoder, mode, monkeypatch, kind, name):
    model = load_model(encoder("bert")).double()
    loss_function, batch = losses.Contrastive(model), batch_of(model, collate=features)
    method = getattr(kind, name)

    def centred(self, *args):
        output = method(self, *args)
        return output - output.mean(dim=(0, 1))

    with monkeypatch.context() as patched:
        patched.setattr(kind, name, centred)
        stock = run(loss_function, batch)
    pylate_fastmaxsim.enable(stock_masking=True)
    run(loss_function, batch)
    assert mode_of(model) == {mode}
    monkeypatch.setattr(kind, name, centred)
    assert_equal(run(loss_function, batch), stock)
    assert mode_of(model) == {mode, "padded"}


def test_a_hook_on_what_is_around_the_model(encoder, mode):
    model = AveragedModel(load_model(encoder("bert")).double())
    model.register_forward_hook(
        lambda _module, _args, output: {
            "token_embeddings": output["token_embeddings"] - output["token_embeddings"].mean()
        }
    )
    loss_function, batch = losses.Contrastive(model), batch_of(model.module, collate=features)
    stock = run(loss_function, batch)
    pylate_fastmaxsim.enable(stock_masking=True)
    assert_equal(run(loss_function, batch), stock)
    assert mode_of(model.module) == {"padded"}


@pytest.mark.parametrize("loss_class, columns", [(losses.Contrastive, 3), (losses.Distillation, 2)])
def test_what_a_module_leaves_in_the_features_is_there_for_a_loss_built_on_another(encoder, mode, loss_class, columns):
    class Regularised(loss_class):
        def forward(self, sentence_features, labels=None):
            loss = super().forward(sentence_features, labels)
            return loss + sum(column["term"] for column in sentence_features)

    model = load_model(encoder("bert")).double()
    model[1] = Leaving(model[1])
    loss_function, batch = Regularised(model), batch_of(model, collate=collated)[:columns]
    labels = torch.rand(6, 1, dtype=torch.float64)
    stock = run(loss_function, [without_total(column) for column in batch], labels)
    pylate_fastmaxsim.enable(stock_masking=True)
    assert_equal(run(loss_function, batch, labels), stock)


def test_hooks_on_weights_see_the_gradients_of_gradcache_that_stock_gives_them(encoder, mode, caplog):
    model = load_model(encoder("bert")).double()
    for weight in model.parameters():
        weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    batch = batch_of(model, collate=features)
    stock = [run(loss(model), batch) for loss in LOSSES]
    pylate_fastmaxsim.enable(stock_masking=True)
    assert_equal(run(losses.Contrastive(model), batch), stock[0])
    assert mode_of(model) == {mode} and "hook" not in caplog.text
    assert_equal(run(losses.CachedContrastive(model), batch), stock[1])
    assert "a hook of your own is on the gradient of 0.auto_model.embeddings.word_embeddings.weight" in caplog.text


@pytest.mark.parametrize("reentrant", [True, False])
def test_reentrant_checkpointing_has_a_backward_of_each_call_too(encoder, mode, reentrant):
    model = load_model(encoder("bert")).double()
    model[0].auto_model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model[0].auto_model.enable_input_require_grads()
    for weight in model.parameters():
        weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    loss_function, batch = losses.Contrastive(model), batch_of(model, collate=features)
    stock = run(loss_function, batch)
    pylate_fastmaxsim.enable(stock_masking=True)
    assert_equal(run(loss_function, batch), stock)
    assert mode_of(model) == {"padded" if reentrant else mode}


def test_hooks_of_all_modules(model):
    assert own_code(model, backwards=True) is None
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert own_code(model, backwards=False) == "a hook of your own is on all modules"
    finally:
        hook.remove()


def test_what_libraries_add_is_nobodys_own(encoder, mode):
    from peft import LoraConfig, TaskType

    model = load_model(encoder("bert"))
    model[0].auto_model.add_adapter(LoraConfig(task_type=TaskType.FEATURE_EXTRACTION, target_modules=["query"]))
    nn.utils.parametrizations.weight_norm(model[1].linear)
    # As wandb.watch puts them on modules and weights.
    wandb = types.ModuleType("wandb.integration.torch")
    exec("def watch(*_):\n    pass", vars(wandb))
    # They are removed again: models that are built with PyLate's Dense share its default activation.
    handles = [module.register_forward_hook(wandb.watch) for module in model.modules()]
    handles += [weight.register_hook(wandb.watch) for weight in model.parameters() if weight.requires_grad]
    pylate_fastmaxsim.enable()
    try:
        run(losses.CachedContrastive(model), batch_of(model, collate=features))
    finally:
        for handle in handles:
            handle.remove()
    assert mode_of(model) == {mode}


def test_what_shows_all_that_it_decorates_is_ones_own(model):
    class Proxy:  # as those of wrapt
        def __init__(self, wrapped):
            self.wrapped = wrapped

        def __getattr__(self, name):
            return getattr(self.wrapped, name)

        def __call__(self, features):
            return self.wrapped(features)

    model[1].forward = Proxy(model[1].forward)
    assert own_code(model, backwards=False) == "Dense is a module of your own"


def test_a_forward_in_a_decorator_of_a_library_is_ones_own(model):
    class Decorated(nn.Module):
        @torch.no_grad()
        def forward(self, features):
            return features

    model.append(Decorated())
    assert own_code(model, backwards=False) == "Decorated is a module of your own"
