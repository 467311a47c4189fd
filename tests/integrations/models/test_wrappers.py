"""Losses of wrapped models, ours against stock."""

from __future__ import annotations

import warnings

from peft import LoraConfig, get_peft_model
from pylate import losses
from sentence_transformers.losses import MatryoshkaLoss
from torch import nn
from torch.optim.swa_utils import AveragedModel

import pylate_fastmaxsim
from tests.support.compared import assert_as_stock, assert_equal, batch_of, mode_of, run
from tests.support.models import load_model


def cut(output):
    return {**output, "token_embeddings": output["token_embeddings"][..., :8]}


class Scoring(nn.Module):
    """Says itself which tokens count."""

    skiplist = ()
    do_query_expansion = False

    def __init__(self, model):
        super().__init__()
        self.module = model

    def forward(self, features):
        return self.module(features)


def test_what_is_around_the_model_keeps_its_effect(model, caplog):
    wrapper = AveragedModel(model)
    wrapper.module = model
    wrapper.register_forward_hook(lambda _module, _args, output: cut(output))
    loss_function, batch = losses.Contrastive(wrapper), batch_of(model)
    assert_as_stock(loss_function, batch)
    assert "Documents are encoded with padding, as stock PyLate does: " in caplog.text


def test_what_is_around_the_model_says_which_tokens_count(model):
    loss_function, batch = losses.Contrastive(AveragedModel(Scoring(model))), batch_of(model)
    stock = run(loss_function, batch)
    assert abs(run(losses.Contrastive(model), batch)[0] - stock[0]) > 0.01
    pylate_fastmaxsim.enable(stock_masking=True)
    assert_equal(run(loss_function, batch), stock)


def test_hooks_of_all_modules_keep_their_effect(model, caplog):
    loss_function, batch = losses.Contrastive(model), batch_of(model)
    hook = nn.modules.module.register_module_forward_hook(
        lambda module, _args, output: cut(output) if module is model else None
    )
    try:
        assert_as_stock(loss_function, batch)
    finally:
        hook.remove()
    assert "a hook of your own is on all modules" in caplog.text


def test_matryoshka_of_sentence_transformers(model, caplog):
    forward = model.forward
    # PyLate's models leave no such key, which this loss shrinks as well.
    model.forward = lambda features: (output := forward(features)) | {"sentence_embedding": output["token_embeddings"]}
    loss_function, batch = MatryoshkaLoss(model, losses.Contrastive(model), [16, 8]), batch_of(model)
    assert_as_stock(loss_function, batch)
    assert "with padding, as stock PyLate does: the forward of ColBERT was replaced" in caplog.text


def test_peft_around_the_whole_model(model, mode):
    wrapped = get_peft_model(model, LoraConfig(target_modules=["Wqkv"], r=4))
    loss_function, batch = losses.Contrastive(wrapped), batch_of(model)
    assert_as_stock(loss_function, batch)
    assert mode_of(wrapped) == mode


def test_deciding_warns_of_nothing_that_training_does_not(encoder):
    model = load_model(encoder("bert"))
    model[0].auto_model.gradient_checkpointing_enable({"use_reentrant": True})
    model[0].auto_model.enable_input_require_grads()
    pylate_fastmaxsim.enable()
    with warnings.catch_warnings(record=True) as said:  # as errors they would be a reason to encode otherwise
        warnings.simplefilter("always")
        losses.Contrastive(model)(batch_of(model), None).backward()
    assert not [str(warning.message) for warning in said]
