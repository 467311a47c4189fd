"""Sentence Transformers' own late interaction: losses, scores and training of a MultiVectorEncoder."""

from __future__ import annotations

import logging

import pytest
import torch
from accelerate import Accelerator
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.multi_vector_encoder import losses
from torch import nn

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations import hosts
from pylate_fastmaxsim.integrations.compilation import layers as compilation_layers
from pylate_fastmaxsim.integrations.sentence_transformers import scores as sentence_transformers_scores
from tests.support.multi_vector import LOSSES, POSITIVES, assert_as_stock, assert_equal, batch_of, load, modes, run


@pytest.fixture
def model(encoder) -> MultiVectorEncoder:
    return load(encoder("bert"))


@pytest.fixture
def scored(monkeypatch) -> list[None]:
    """An entry for each time that an operator was called."""
    made = []

    def counted(operator):
        return lambda *args, **kwargs: made.append(None) or operator(*args, **kwargs)

    monkeypatch.setattr(
        sentence_transformers_scores, "pooled_scores", counted(sentence_transformers_scores.pooled_scores)
    )
    monkeypatch.setattr(sentence_transformers_scores, "xtr_scores", counted(sentence_transformers_scores.xtr_scores))
    return made


@pytest.mark.parametrize("loss_class, options", LOSSES)
def test_losses_and_gradients_are_those_of_stock(model, mode, scored, loss_class, options):
    assert_as_stock(model, loss_class(model, **options))
    assert modes(model) == {mode}
    assert scored


@pytest.mark.parametrize("family", ["modernbert", "mpnet", "longrope"])
def test_encoders(encoder, mode, family):
    model = load(encoder(family))
    assert_as_stock(model, losses.MultiVectorMultipleNegativesRankingLoss(model))
    # MPNet attends in code of its own; long texts change what this Llama makes of short ones.
    assert modes(model) == {{"mpnet": "grouped", "longrope": "padded"}.get(family, mode)}


@pytest.mark.parametrize(("strategy", "attend"), [("fixed", True), ("min", False)])
def test_query_expansion(encoder, mode, strategy, attend, caplog):
    model = load(encoder("bert"))
    model[0].query_expansion = {"strategy": strategy, "attend": attend, "length": 10}
    assert_as_stock(model, losses.MultiVectorMultipleNegativesRankingLoss(model))
    # That they are padded is the rule.
    assert "with padding" not in caplog.text


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(model, mode, reentrant):
    model[0].auto_model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model[0].auto_model.enable_input_require_grads()
    assert_as_stock(model, losses.CachedMultiVectorMultipleNegativesRankingLoss(model, mini_batch_size=3))
    assert modes(model) == {mode}


@pytest.mark.compile
def test_compiled_layers(model, packed, traced):
    """Also of expanded queries: checkpointing has to do in the backward what it did in the forward."""
    seen = []
    model[0].query_expansion = {"strategy": "fixed", "attend": False, "length": 10}
    model[0].auto_model.gradient_checkpointing_enable({"use_reentrant": False})
    layers = compilation_layers.encoder_layers(model[0])
    hook = model[1].register_forward_hook(lambda *_: seen.append(layers[0]._compiled_call_impl is not None))
    assert_as_stock(model, losses.MultiVectorMultipleNegativesRankingLoss(model), compile=True)
    hook.remove()
    stock, ours = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    assert not any(stock) and all(ours)
    pylate_fastmaxsim.disable()
    assert all(layer._compiled_call_impl is None for layer in layers)


@pytest.mark.compile
def test_a_model_that_is_compiled_as_a_whole_is_encoded_as_it_came(model):
    loss = losses.MultiVectorMultipleNegativesRankingLoss(model)
    stock = run(model, loss)
    pylate_fastmaxsim.enable()
    model.compile(backend="eager")
    assert_equal(run(model, loss), stock)
    assert not modes(model)


def test_only_training_leaves_padding_out(model, mode):
    pylate_fastmaxsim.enable()
    with torch.no_grad():
        model.eval()(batch_of(model)[1], task="document")
        model.encode_document(POSITIVES[:2], show_progress_bar=False)
    assert not modes(model)
    model.train()(batch_of(model)[1], task="document")
    assert modes(model) == {mode}


def test_the_output_is_that_of_stock_but_for_padding(model, mode):
    features = batch_of(model)[1]
    stock = model[0](dict(features))["token_embeddings"]
    pylate_fastmaxsim.enable()
    seen = []
    hook = model[1].register_forward_pre_hook(lambda _, args: seen.append(dict(args[0])))
    model(dict(features), task="document")
    hook.remove()
    assert seen[0].keys() == {*features, "token_embeddings"}
    attended = features["attention_mask"].bool()
    torch.testing.assert_close(seen[0]["token_embeddings"][attended], stock[attended])
    assert seen[0]["token_embeddings"].shape == stock.shape
    # Where a length of 0 would be divided by, losses would be NaN.
    assert seen[0]["token_embeddings"][~attended].any(dim=-1).all()


def test_a_model_as_accelerate_prepares_it(model, mode):
    prepared = Accelerator(cpu=True, mixed_precision="bf16").prepare_model(model.float())
    features = batch_of(model)[1]
    stock = prepared(dict(features), task="document")
    pylate_fastmaxsim.enable()
    ours = prepared(dict(features), task="document")["token_embeddings"]
    assert modes(model) == {mode}
    # The check on the first batch runs inside of accelerate's autocast, which must end all the same.
    assert not torch.is_autocast_enabled("cpu")
    attended = stock["attention_mask"]
    torch.testing.assert_close(ours[attended], stock["token_embeddings"][attended], rtol=0, atol=0.05)


def test_off_again_everything_is_as_it_came(model, caplog):
    from sentence_transformers.base.modules import Transformer

    names = {"__call__", "forward"}
    stock = Transformer.forward, names & vars(MultiVectorEncoder).keys()
    with caplog.at_level(logging.INFO), pylate_fastmaxsim.enabled():
        assert Transformer.forward is not stock[0]
        run(model, losses.MultiVectorMultipleNegativesRankingLoss(model))
    assert (Transformer.forward, names & vars(MultiVectorEncoder).keys()) == stock
    assert MultiVectorEncoder.__call__ is nn.Module.__call__
    assert "Sentence Transformers" in caplog.text and " accelerated: fused MaxSim" in caplog.text


def test_an_option_that_only_pylate_has(caplog, monkeypatch):
    # Another host may be there too.
    of_sentence_transformers = tuple(host for host in hosts.HOSTS if host.name == "Sentence Transformers")
    monkeypatch.setattr(hosts, "HOSTS", of_sentence_transformers)
    pylate_fastmaxsim.enable(stock_masking=True)
    assert "stock_masking=True has no effect: it is an option for PyLate." in caplog.text
