"""Whole training runs with the Sentence Transformers trainer, stock and ours."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from pylate import losses
from pylate.models import ColBERT
from pylate.utils import ColBERTCollator
from sentence_transformers import SentenceTransformerTrainer
from transformers import Trainer

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.encoding import modes
from tests.support.encoded import mode_of
from tests.support.models import load_model, sentences
from tests.support.training_runs import BATCH, ROWS, candidates, pairs, train

pytestmark = pytest.mark.e2e


class PicksRows(losses.Contrastive):
    """Scores every second query only, and looks at all texts in one column."""

    def forward(self, sentence_features, labels=None):
        columns = list(sentence_features)
        self.widest = {key: torch.cat([column[key] for column in columns[1:]]) for key in columns[1]}
        rows = torch.arange(0, len(columns[0]["input_ids"]), 2)
        return super().forward([{key: value[rows] for key, value in column.items()} for column in columns], labels)


class ItemsCollator(ColBERTCollator):
    def __call__(self, features):
        return [*super().__call__(features).items()]


class Batch(dict):
    pass


class BatchCollator(ColBERTCollator):
    def __call__(self, features):
        return Batch(super().__call__(features))


class FromBehind(SentenceTransformerTrainer):
    """Takes a batch of a type of its own, and reorders its rows before the loss."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        assert type(inputs) in (Batch, list)
        inputs = dict(inputs)
        rows = torch.arange(len(inputs["query_input_ids"])).flip(0)
        inputs = {key: value[rows] if isinstance(value, torch.Tensor) else value for key, value in inputs.items()}
        return super().compute_loss(model, inputs, *args, **kwargs)


class Run(NamedTuple):
    loss: Callable = partial(losses.Contrastive, temperature=0.1)
    data: Callable = pairs
    # A trainer and a collator.
    classes: tuple[type, ...] = ()
    arguments: dict = {}
    # In the run with the flag only.
    ours: dict = {}
    compiled: bool = False
    tolerance: float = 2e-3


def a_loss_each(model):
    return {"triplets": losses.Contrastive(model, temperature=0.1), "scored": losses.Distillation(model)}


CHECKPOINTING = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
COMPILED = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
RUNS = {
    "contrastive": Run(ours={"dataloader_num_workers": 2, "eval_strategy": "epoch"}),
    "cached": Run(
        partial(losses.CachedContrastive, mini_batch_size=4, temperature=0.1), ours={"eval_strategy": "epoch"}
    ),
    "distillation": Run(losses.Distillation, candidates, ours={"eval_strategy": "epoch"}),
    "several datasets with a loss each": Run(
        a_loss_each,
        lambda: {"triplets": pairs(), "scored": candidates()},
        arguments={"multi_dataset_batch_sampler": "round_robin"},
    ),
    "mixed precision": Run(arguments={"bf16": True, **CHECKPOINTING}, tolerance=0.05),
    "compiled by the trainer": Run(arguments={"max_steps": 2}, ours=COMPILED),
    "compiled before": Run(arguments={"max_steps": 2}, compiled=True),
    # The trainer gives a column all keys that begin with its name: `negative` also gets what belongs to `negative_1`.
    "own loss": Run(partial(PicksRows, temperature=0.1), lambda: pairs("positive", "negative", "negative_1")),
    "own trainer, items": Run(classes=(FromBehind, ItemsCollator)),
    "own trainer, dicts": Run(classes=(FromBehind, BatchCollator)),
}


@pytest.mark.parametrize("run", [pytest.param(run, id=name) for name, run in RUNS.items()])
def test_loss_curves(encoder, packed, tmp_path, caplog, run):
    def built():
        model = load_model(encoder("bert", num_hidden_layers=1))
        return model, run.loss(model)

    stock = train(*built(), run.data(), tmp_path, *run.classes, **run.arguments)
    torch._dynamo.reset()
    model, loss = built()
    if run.compiled:
        model.compile(backend="aot_eager")
    caplog.set_level(logging.INFO, "pylate_fastmaxsim")
    pylate_fastmaxsim.enable(stock_masking=True)
    ours = train(model, loss, run.data(), tmp_path, *run.classes, **run.arguments, **run.ours)
    torch._dynamo.reset()
    assert ours == pytest.approx(stock, rel=run.tolerance, abs=run.tolerance)
    assert mode_of(model) == {"packed"} and "not packed" not in caplog.text
    if "max_steps" not in run.arguments:
        assert len(ours) == 2 * ROWS // BATCH * (2 if run.loss is a_loss_each else 1)
        assert stock[-1] < stock[0] or run.classes


@pytest.mark.smoke
def test_counts_of_the_collator_are_used(encoder, packed, tmp_path, no_search):
    class Trainer(SentenceTransformerTrainer):
        def training_step(self, *args, **kwargs):
            if self.state.global_step == 1:  # the first decides how to encode
                no_search()
            return super().training_step(*args, **kwargs)

    # Its local layers see all of a query, so that queries are encoded with packed documents.
    model = load_model(encoder("modernbert", local_attention=24))
    pylate_fastmaxsim.enable()
    curve = train(model, losses.Contrastive(model), pairs(), tmp_path, Trainer, dataloader_num_workers=2)
    assert len(curve) == 2 * ROWS // BATCH
    assert set(modes.joined[model].values()) == {True}


def test_what_replaces_the_preparation_of_all_trainers_is_called(encoder, tmp_path, monkeypatch):
    model, prepare, called = load_model(encoder("modernbert")), Trainer._prepare_inputs, []
    pylate_fastmaxsim.enable()
    monkeypatch.setattr(Trainer, "_prepare_inputs", lambda *args: called.append(None) or prepare(*args))
    curve = train(model, losses.Contrastive(model), pairs(), tmp_path, max_steps=2)
    assert len(called) == len(curve)


def test_a_checkpoint_is_an_ordinary_model(encoder, packed, tmp_path):
    model = load_model(encoder("modernbert"))
    pylate_fastmaxsim.enable()
    train(model, losses.Contrastive(model), pairs(), tmp_path, save_strategy="steps", save_steps=4, max_steps=4)
    pylate_fastmaxsim.disable()
    checkpoint = tmp_path / "checkpoint-4"
    assert not any("fastmaxsim" in path.read_text() for path in checkpoint.rglob("*.json"))
    again, texts = ColBERT(model_name_or_path=str(checkpoint), device="cpu"), sentences(4)
    for own, other in zip(again.encode(texts, is_query=False), model.eval().encode(texts, is_query=False), strict=True):
        assert own == pytest.approx(other, abs=1e-5)
