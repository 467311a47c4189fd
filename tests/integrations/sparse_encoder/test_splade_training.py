"""Training of SPLADE models as a whole: the trainer, precisions, dropout, checkpointing and compiled layers."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from datasets import Dataset
from sentence_transformers import SparseEncoderTrainer, SparseEncoderTrainingArguments
from sentence_transformers.sparse_encoder import losses

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.compilation.layers import encoder_layers
from tests.support.examples import training_example
from tests.support.sparse_encoders import splade, transformer_of
from tests.support.splade_steps import (
    CACHED,
    TEXTS,
    Decoded,
    assert_as_stock,
    assert_equal,
    batch_of,
    error,
    modes,
    run,
    splade_loss,
)

CONTRASTIVE = losses.SparseMultipleNegativesRankingLoss


@pytest.fixture
def model(encoder):
    return splade(encoder("bert", masked_lm=True))


def test_a_run_of_the_trainer(model, packed, monkeypatch, tmp_path):
    model.float()
    columns = dict(zip(("anchor", "positive", "negative"), TEXTS, strict=False))
    rows = Dataset.from_dict(columns)
    start = {name: weight.clone() for name, weight in model.state_dict().items()}

    def logged() -> list[float]:
        model.load_state_dict(start)
        trainer = SparseEncoderTrainer(
            model=model,
            args=SparseEncoderTrainingArguments(
                output_dir=str(tmp_path),
                max_steps=4,
                per_device_train_batch_size=3,
                learning_rate=1e-2,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                use_cpu=True,
                disable_tqdm=True,
            ),
            train_dataset=rows,
            loss=splade_loss(model, CONTRASTIVE),
        )
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    decoded = Decoded.of(model, monkeypatch)
    stock = logged()
    assert len(set(stock)) == 4
    decoded.tokens.clear()
    pylate_fastmaxsim.enable()
    assert logged() == pytest.approx(stock, rel=1e-4)
    # Of a few tokens of the first batch, the check computes logits in both ways.
    assert len(decoded.tokens) == 2


def test_the_script_of_the_docs(encoder, packed, monkeypatch, tmp_path):
    stand_in = encoder("distilbert", masked_lm=True)
    script = training_example("splade-script", "distilbert/distilbert-base-uncased", stand_in)
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(script, names)
    assert names["trainer"].state.global_step == 1 and modes(names["model"]) == {"packed"}


def test_bf16(model, mode, monkeypatch):
    model.float()
    loss, batch = splade_loss(model, CONTRASTIVE), batch_of(model, 3)
    exact, stock = run(model, loss, batch), run(model, loss, batch, bf16=True)
    decoded = Decoded.of(model, monkeypatch)
    pylate_fastmaxsim.enable()
    for _ in range(2):
        decoded.tokens.clear()
        ours = run(model, loss, batch, bf16=True)
    assert not decoded.tokens
    assert ours[0].dtype == stock[0].dtype
    assert error(ours, exact) < 2 * error(stock, exact)
    assert ours[0].item() == pytest.approx(exact[0].item(), rel=2e-2)


@pytest.mark.parametrize("options", [{}, CACHED])
def test_dropout(encoder, packed, monkeypatch, options):
    model = splade(encoder("bert", masked_lm=True, hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3))
    loss, batch = splade_loss(model, CONTRASTIVE, **options), batch_of(model, 3)
    decoded = Decoded.of(model, monkeypatch)
    pylate_fastmaxsim.enable()
    first = run(model, loss, batch)
    decoded.tokens.clear()
    values = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        values.append(run(model, loss, batch))
    assert not decoded.tokens
    assert_equal(values[0], values[1])
    assert len({value.item() for value, _ in (first, *values)}) == 3


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(model, mode, monkeypatch, reentrant):
    transformer_of(model).auto_model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    steps = {
        "contrastive": (splade_loss(model, CONTRASTIVE), batch_of(model, 3)),
        "cached": (splade_loss(model, CONTRASTIVE, **CACHED), batch_of(model, 3)),
    }
    assert_as_stock(model, Decoded.of(model, monkeypatch), steps)


@pytest.mark.compile
def test_compiled_layers(model, packed, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    steps = {"contrastive": (splade_loss(model, CONTRASTIVE), batch_of(model, 3))}
    assert_as_stock(model, Decoded.of(model, monkeypatch), steps, compile=True)
    assert all(layer._compiled_call_impl is not None for layer in encoder_layers(model))
