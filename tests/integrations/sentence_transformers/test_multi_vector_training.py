"""A MultiVectorEncoder trained by the trainer of Sentence Transformers, and scripts that do so."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.support.examples import training_example
from tests.support.models import sentences

pytest.importorskip(
    "sentence_transformers.multi_vector_encoder", reason="no MultiVectorEncoder before Sentence Transformers 6"
)
pytest.importorskip("datasets")

from datasets import Dataset
from sentence_transformers import MultiVectorEncoder, MultiVectorEncoderTrainer, MultiVectorEncoderTrainingArguments
from sentence_transformers.multi_vector_encoder import losses
from sentence_transformers.multi_vector_encoder.evaluation import MultiVectorTripletEvaluator

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations import doctor
from pylate_fastmaxsim.integrations.encoding import modes

ROWS = {"query": sentences(12, 6, 1), "positive": sentences(12, 20, 2), "negative": sentences(12, 20, 3)}
SCRIPT = """
import torch
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.util import maxsim
from pylate_fastmaxsim.integrations.options import current_options
print("on" if current_options() else "off", "forward" in vars(MultiVectorEncoder),
      maxsim(torch.ones(1, 1, 1), torch.full((1, 1, 1), 2.0)).item())
"""


def train(path: str, folder) -> tuple[list[float], MultiVectorEncoder]:
    torch.manual_seed(0)
    model = MultiVectorEncoder(path, device="cpu")
    options = {"per_device_train_batch_size": 4, "max_steps": 4, "logging_steps": 1, "report_to": "none"}
    trainer = MultiVectorEncoderTrainer(
        model=model,
        args=MultiVectorEncoderTrainingArguments(str(folder), use_cpu=True, disable_tqdm=True, **options),
        train_dataset=Dataset.from_dict(ROWS),
        eval_dataset=Dataset.from_dict(ROWS),
        loss=losses.CachedMultiVectorMultipleNegativesRankingLoss(model, mini_batch_size=2),
        evaluator=MultiVectorTripletEvaluator(ROWS["query"], ROWS["positive"], ROWS["negative"]),
    )
    trainer.train()
    trainer.evaluate()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], model


@pytest.mark.e2e
def test_training_is_that_of_stock(encoder, packed, tmp_path):
    path = encoder("bert")
    stock, _ = train(path, tmp_path / "stock")
    pylate_fastmaxsim.enable()
    ours, model = train(path, tmp_path / "fast")
    assert ours == pytest.approx(stock, rel=1e-4)
    assert set(modes.chosen[model[0]].values()) == {"packed"}
    model.save_pretrained(str(tmp_path / "saved"))
    expected = model.encode_document(ROWS["positive"][:2])
    pylate_fastmaxsim.disable()
    reloaded = MultiVectorEncoder(str(tmp_path / "saved"), device="cpu")
    for own, other in zip(reloaded.encode_document(ROWS["positive"][:2]), expected, strict=True):
        torch.testing.assert_close(own, other)


def test_the_script_of_the_docs(encoder, packed, monkeypatch, tmp_path):
    script = training_example("multi-vector-script", "answerdotai/ModernBERT-base", encoder("modernbert"))
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(script, names)
    assert names["trainer"].state.global_step == 1
    assert set(modes.chosen[names["model"][0]].values()) == {"packed"}


@pytest.mark.process
def test_a_script_that_is_not_edited(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "pylate_fastmaxsim.run", "script.py"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["on", "True", "2.0"]
    assert "Sentence Transformers" in said.stderr and "Nothing was accelerated" not in said.stderr


def test_the_doctor_names_what_is_replaced():
    patches = doctor.diagnose()["enable() replaces"]
    assert {
        "sentence_transformers.util.similarity.maxsim",
        "sentence_transformers.base.modules.transformer.Transformer.forward",
    } <= set(patches)
