"""Losses of models that somebody wrapped or changed, ours against stock."""

from __future__ import annotations

import warnings

import pytest
import torch
from models import load_model
from peft import LoraConfig, get_peft_model
from pylate import losses
from sentence_transformers.losses import MatryoshkaLoss
from test_pylate_losses import assert_equal, batch_of, mode_of, run
from torch import nn
from torch.optim.swa_utils import AveragedModel

import pylate_fastmaxsim


def cut(output):
    return {**output, "token_embeddings": output["token_embeddings"][..., :8]}


class Cutting(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.module = model

    def forward(self, features):
        return cut(self.module(features))


class LookingAtPadding(Cutting):
    def forward(self, features):
        output = self.module(features)
        embeddings = output["token_embeddings"]
        position = torch.linspace(-1, 1, embeddings.shape[1], dtype=embeddings.dtype)
        return {**output, "token_embeddings": embeddings + position[:, None]}


def averaged_with_a_hook(model):
    wrapper = AveragedModel(model)
    wrapper.module = model
    wrapper.register_forward_hook(lambda _module, _args, output: cut(output))
    return wrapper


@pytest.mark.parametrize("fused_head", [True, False])
@pytest.mark.parametrize("loss_class", [losses.Contrastive, losses.CachedContrastive])
@pytest.mark.parametrize("wrap", [Cutting, LookingAtPadding, averaged_with_a_hook])
def test_what_is_around_the_model_keeps_its_effect(model, mode, wrap, loss_class, fused_head):
    loss_function = loss_class(wrap(model))
    batch = batch_of(model)
    stock = run(loss_function, batch)
    pylate_fastmaxsim.enable(stock_masking=True, fused_head=fused_head)
    assert_equal(run(loss_function, batch), stock)


class Scoring(nn.Module):
    """Says itself which tokens count."""

    def __init__(self, model):
        super().__init__()
        self.module = model
        self.skiplist = []
        self.do_query_expansion = False

    def forward(self, features):
        return self.module(features)


@pytest.mark.parametrize("wrap", [Scoring, lambda model: AveragedModel(Scoring(model))], ids=["outermost", "inside"])
@pytest.mark.parametrize("loss_class", [losses.Contrastive, losses.CachedContrastive])
def test_what_is_around_the_model_says_which_tokens_count(model, mode, wrap, loss_class):
    loss_function, batch = loss_class(wrap(model)), batch_of(model)
    stock = run(loss_function, batch)
    assert abs(run(loss_class(model), batch)[0] - stock[0]) > 0.01
    pylate_fastmaxsim.enable(stock_masking=True)
    assert_equal(run(loss_function, batch), stock)


def test_hooks_of_all_modules_keep_their_effect(model, mode):
    loss_function, batch = losses.Contrastive(model), batch_of(model)
    hook = nn.modules.module.register_module_forward_hook(
        lambda module, _args, output: cut(output) if module is model else None
    )
    try:
        stock = run(loss_function, batch)
        pylate_fastmaxsim.enable(stock_masking=True)
        assert_equal(run(loss_function, batch), stock)
    finally:
        hook.remove()


def test_matryoshka_of_sentence_transformers(model, mode, caplog):
    forward = model.forward
    # PyLate's models leave no such key, which this loss shrinks as well.
    model.forward = lambda features: (output := forward(features)) | {"sentence_embedding": output["token_embeddings"]}
    loss_function, batch = MatryoshkaLoss(model, losses.Contrastive(model), [16, 8]), batch_of(model)
    stock = run(loss_function, batch)
    pylate_fastmaxsim.enable(stock_masking=True)
    for _ in range(2):
        assert_equal(run(loss_function, batch), stock)
    assert "with padding, as stock PyLate does: the forward of ColBERT was replaced" in caplog.text


def test_peft_around_the_whole_model(model, mode):
    wrapped = get_peft_model(model, LoraConfig(target_modules=["Wqkv"], r=4))
    loss_function, batch = losses.Contrastive(wrapped), batch_of(model)
    stock = run(loss_function, batch)
    pylate_fastmaxsim.enable(stock_masking=True)
    assert_equal(run(loss_function, batch), stock)
    assert mode_of(wrapped) == mode


def test_deciding_warns_of_nothing_that_training_does_not(encoder, mode):
    model = load_model(encoder("bert"))
    model[0].auto_model.gradient_checkpointing_enable({"use_reentrant": True})
    model[0].auto_model.enable_input_require_grads()
    pylate_fastmaxsim.enable()
    with warnings.catch_warnings(record=True) as said:  # as errors they would be a reason to encode otherwise
        warnings.simplefilter("always")
        losses.Contrastive(model)(batch_of(model), None).backward()
    assert not [str(warning.message) for warning in said]
