"""Whole training runs with the Sentence Transformers trainer, stock and ours."""

import logging
from functools import partial

import pytest
import torch
from pylate import losses

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.encoding import modes
from tests.support.models import load_model
from tests.support.training_runs import BATCH, ROWS, candidates, pairs, train

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize(
    "loss_class, options, data",
    [
        # The trainer gives a column all keys that begin with its name: `negative` also gets what belongs to `negative_1`.
        (losses.Contrastive, {"temperature": 0.1}, partial(pairs, "positive", "negative", "negative_1")),
        (losses.CachedContrastive, {"mini_batch_size": 4}, pairs),
        (losses.Distillation, {}, candidates),
    ],
    ids=["contrastive", "cached", "distillation"],
)
def test_loss_curves(encoder, packed, tmp_path, loss_class, options, data):
    def curve(**arguments):
        # Its local layers see all of a query, so that queries are encoded with packed documents.
        model = load_model(encoder("modernbert", local_attention=24))
        return train(model, loss_class(model, **options), data(), tmp_path, **arguments)

    stock = curve()
    pylate_fastmaxsim.enable(stock_masking=True)
    ours = curve(dataloader_num_workers=2, eval_strategy="epoch")
    assert len(ours) == 2 * ROWS // BATCH
    assert ours == pytest.approx(stock, rel=2e-3, abs=2e-3)
    assert stock[-1] < stock[0]
    joint = loss_class is not losses.CachedContrastive
    assert [set(found.values()) for found in modes.joined.values()] == [{True}] * joint


def test_several_datasets_with_a_loss_each(encoder, tmp_path):
    def curve():
        model = load_model(encoder("modernbert"))
        data = {"triplets": pairs(), "scored": candidates()}
        loss = {"triplets": losses.Contrastive(model, temperature=0.1), "scored": losses.Distillation(model)}
        return train(model, loss, data, tmp_path, multi_dataset_batch_sampler="round_robin")

    stock = curve()
    assert len(stock) == 2 * 2 * ROWS // BATCH
    pylate_fastmaxsim.enable(stock_masking=True)
    assert curve() == pytest.approx(stock, rel=2e-3, abs=2e-3)


def test_mixed_precision_and_gradient_checkpointing(encoder, packed, tmp_path, caplog):
    def curve():
        model = load_model(encoder("modernbert"))
        options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
        return train(model, losses.Contrastive(model, temperature=0.1), pairs(), tmp_path, bf16=True, **options)

    stock = curve()
    pylate_fastmaxsim.enable(stock_masking=True)
    with caplog.at_level(logging.INFO, "pylate_fastmaxsim"):
        assert curve() == pytest.approx(stock, rel=0.05, abs=0.05)
    assert "not packed" not in caplog.text


@pytest.mark.smoke
def test_enabled_between_building_and_training(encoder, packed, tmp_path):
    def built():
        model = load_model(encoder("bert"))
        return model, losses.Contrastive(model, temperature=0.1)

    stock = train(*built(), pairs(), tmp_path)
    model, loss = built()
    pylate_fastmaxsim.enable(stock_masking=True)
    assert train(model, loss, pairs(), tmp_path) == pytest.approx(stock, rel=2e-3)
    assert set(modes.chosen[model].values()) == {"packed"}


@pytest.mark.parametrize("by_the_trainer", [True, False], ids=["torch_compile=True", "model.compile()"])
def test_compiled_model(encoder, packed, tmp_path, by_the_trainer):
    def curve(compiled):
        model = load_model(encoder("bert", num_hidden_layers=1))
        if compiled and not by_the_trainer:
            model.compile(backend="aot_eager")
        options = {"torch_compile": True, "torch_compile_backend": "aot_eager"} if compiled and by_the_trainer else {}
        return model, train(model, losses.Contrastive(model), pairs(), tmp_path, max_steps=2, **options)

    _, stock = curve(False)
    torch._dynamo.reset()
    pylate_fastmaxsim.enable(stock_masking=True)
    model, ours = curve(True)
    torch._dynamo.reset()
    assert ours == pytest.approx(stock, rel=2e-3)
    assert set(modes.chosen[model].values()) == {"packed"}
