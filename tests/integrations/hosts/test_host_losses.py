"""Losses of every host and their gradients, with the flag and without, however the model is trained."""

import pytest
import torch

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.compilation.layers import encoder_layers
from tests.support.compared import distance
from tests.support.examples import example
from tests.support.hosts import COMMON, OF_SENTENCE_TRANSFORMERS, PACKAGES, each_host, each_loss, host_of
from tests.support.models import checkpointed


@pytest.mark.parametrize("host, loss, mode", each_loss(), indirect=["mode"])
def test_loss_and_gradients_are_those_of_stock(encoder, monkeypatch, caplog, host, loss, mode):
    model = host.model(encoder)
    host.assert_as_stock(model, host.losses[loss](model), monkeypatch)
    assert host.modes(model) == {mode}
    assert "as stock" not in caplog.text and "(running " not in caplog.text


FAMILIES = [
    param
    for name in PACKAGES
    for family, only in getattr(host_of(name), "families", {"bert": None}).items()
    for param in each_host([name], family, only)
]


@pytest.mark.parametrize("host, family, only", FAMILIES)
def test_encoders(encoder, mode, monkeypatch, host, family, only):
    model = host.model(encoder, family)
    host.assert_as_stock(model, host.losses["contrastive"](model), monkeypatch)
    assert host.modes(model) == {only or mode}


@pytest.mark.parametrize("host, loss", [param for loss in COMMON[::2] for param in each_host(PACKAGES, loss)])
def test_bf16(encoder, mode, monkeypatch, host, loss):
    """About as far from float32 as stock in the same precision. A winner that bf16 picks otherwise moves gradients."""
    model = host.model(encoder).float()
    step = host.losses[loss](model)
    exact, stock = step.run(), step.run(bf16=True)
    seen = host.watch(model, monkeypatch)
    host.enable()
    for _ in range(2):
        seen.clear()
        ours = step.run(bf16=True)
    assert bool(seen) != host.watches_stock and host.modes(model) == {mode}
    assert ours[0].dtype == stock[0].dtype
    assert distance(ours, exact) < max(0.15, 2 * distance(stock, exact))
    assert ours[0].item() == pytest.approx(exact[0].item(), rel=2e-2)


CHECKPOINTED = [(True, "contrastive", "packed"), (False, "cached", "packed"), (False, "cached", "grouped")]


@pytest.mark.parametrize(
    "host, reentrant, loss, mode",
    [param for each in CHECKPOINTED for param in each_host(PACKAGES, *each)],
    indirect=["mode"],
)
def test_checkpointing(encoder, monkeypatch, host, reentrant, loss, mode):
    model = host.model(encoder)
    checkpointed([host.transformer(model)], reentrant)
    host.assert_as_stock(model, host.losses[loss](model), monkeypatch)
    assert host.modes(model) == {mode}


@pytest.mark.parametrize("host", each_host())
def test_without_gradients_and_in_evaluation(encoder, packed, host):
    model = host.model(encoder)
    steps = [host.losses[name](model) for name in ("contrastive", "cached")]
    for training in (True, False):
        model.train(training)
        with torch.no_grad():
            stock = [step.value() for step in steps]
            host.enable()
            ours = [step.value() for step in steps]
            pylate_fastmaxsim.disable()
        for own, other, step in zip(ours, stock, steps, strict=True):
            torch.testing.assert_close(own, other, rtol=step.tolerance, atol=0)
            assert not own.requires_grad


@pytest.mark.parametrize("host", each_host())
def test_dropout_is_drawn_anew_and_by_the_seed(encoder, packed, host):
    model = host.model(encoder, hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3)
    step = host.losses["contrastive"](model)
    host.enable()
    step.run()
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses.append(step.run())
    step.assert_equal(losses[0], losses[1])
    assert losses[0][0] != losses[2][0]


@pytest.mark.parametrize("host", each_host(OF_SENTENCE_TRANSFORMERS))
@pytest.mark.compile
def test_compiled_layers(encoder, packed, traced, monkeypatch, host):
    """Checkpointing has to do in the backward what it did in the forward."""
    model = host.model(encoder, num_hidden_layers=1)
    checkpointed([host.transformer(model)])
    host.assert_as_stock(model, host.losses["contrastive"](model), monkeypatch, compile=True)
    assert all(layer._compiled_call_impl is not None for layer in encoder_layers(model))
    pylate_fastmaxsim.disable()
    assert all(layer._compiled_call_impl is None for layer in encoder_layers(model))


@pytest.mark.parametrize("host", each_host(OF_SENTENCE_TRANSFORMERS))
@pytest.mark.compile
def test_a_model_that_is_compiled_as_a_whole_is_encoded_as_it_came(encoder, host):
    model = host.model(encoder)
    step = host.losses["contrastive"](model)
    stock = step.run()
    host.enable()
    model.compile(backend="eager")
    step.assert_equal(step.run(), stock)
    assert not host.modes(model)


@pytest.mark.parametrize("host", each_host(["MultiVectorEncoder"]))
def test_the_poolings_of_the_docs(encoder, packed, host):
    stand_in = encoder("modernbert", **host.changes)
    names: dict = {}
    exec(example("pooled-scores-multi-vector", {'"answerdotai/ModernBERT-base"': repr(stand_in)}), names)
    assert names["scores"].shape == (1, 2)
    for loss in ("contrastive", "margins"):
        step = host.losses["distillation"](names["model"].float())
        names[loss](step.batch, step.labels.float()).backward()
