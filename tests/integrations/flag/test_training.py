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


def contrastive(model):
    return losses.Contrastive(model, temperature=0.1)


def of_each(model):
    return {"triplets": contrastive(model), "scored": losses.Distillation(model)}


def of_each_data():
    return {"triplets": pairs(), "scored": candidates()}


# The trainer gives a column all keys that begin with its name: `negative` also gets what belongs to `negative_1`.
COLUMNS = partial(pairs, "positive", "negative", "negative_1")
WORKERS = {"dataloader_num_workers": 2, "eval_strategy": "epoch"}
MIXED = {"bf16": True, "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
# The losses and their data, arguments of both trainings and of ours, and how near the losses of steps are.
CURVES = {
    "columns": (contrastive, COLUMNS, {}, WORKERS, 2e-3),
    "several data sets": (of_each, of_each_data, {"multi_dataset_batch_sampler": "round_robin"}, {}, 2e-3),
    "mixed precision": (contrastive, pairs, MIXED, {}, 0.05),
}


@pytest.mark.parametrize("make, data, arguments, own, tolerance", CURVES.values(), ids=CURVES)
def test_loss_curves(encoder, packed, tmp_path, caplog, make, data, arguments, own, tolerance):
    def curve(**own):
        # Its local layers see all of a query, so that queries are encoded with packed documents.
        model = load_model(encoder("modernbert", local_attention=24))
        return train(model, make(model), data(), tmp_path, **arguments, **own)

    stock = curve()
    assert len(stock) == 2 * ROWS // BATCH * (1 + (make is of_each))
    pylate_fastmaxsim.enable(stock_masking=True)
    with caplog.at_level(logging.INFO, "pylate_fastmaxsim"):
        assert curve(**own) == pytest.approx(stock, rel=tolerance, abs=tolerance)
    assert "not packed" not in caplog.text
    assert [set(found.values()) for found in modes.joined.values()] == [{True}]


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
            model.compile(backend="eager")
        options = {"torch_compile": True, "torch_compile_backend": "eager"} if compiled and by_the_trainer else {}
        return model, train(model, losses.Contrastive(model), pairs(), tmp_path, max_steps=2, **options)

    _, stock = curve(False)
    torch._dynamo.reset()
    pylate_fastmaxsim.enable(stock_masking=True)
    model, ours = curve(True)
    torch._dynamo.reset()
    assert ours == pytest.approx(stock, rel=2e-3)
    assert set(modes.chosen[model].values()) == {"packed"}
