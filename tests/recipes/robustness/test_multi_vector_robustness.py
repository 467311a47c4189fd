"""``fastmaxsim robustness`` with models of Sentence Transformers 6, where PyLate is not installed."""

from __future__ import annotations

import json

import pytest

pytest.importorskip(
    "sentence_transformers.multi_vector_encoder", reason="no MultiVectorEncoder before Sentence Transformers 6"
)

import torch
from sentence_transformers import MultiVectorEncoder

from pylate_fastmaxsim.recipes.data.collection import load_collection
from pylate_fastmaxsim.recipes.evaluation.ranking import evaluate_collection
from pylate_fastmaxsim.recipes.models.retriever import retriever_of
from pylate_fastmaxsim.recipes.robustness.measure import measure
from pylate_fastmaxsim.recipes.robustness.task import Settings, collection_task
from tests.support.beir_folder import write_folder
from tests.support.command_line import fastmaxsim


@pytest.mark.parametrize("length", [12, None])
def test_a_multi_vector_encoder_is_measured_as_a_colbert(length, encoder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    torch.manual_seed(0)
    model = MultiVectorEncoder(encoder("bert"), device="cpu", prompts={"query": "[Q] ", "document": "[D] "})
    model[0].document_length = length
    if length is None:
        model.max_seq_length = 12
    model.save_pretrained(str(tmp_path / "late"))
    data = write_folder(tmp_path / "data")
    arguments = ["robustness", str(tmp_path / "late"), "--beir", str(data), "--times", "1,4", "--tokens", "0,5"]
    done = fastmaxsim([*arguments, "--pooling", "max"])
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "robustness.json").read_text())
    assert (result["kind"], result["appended"], result["document_length"]) == ("late interaction", "text", 12)
    assert result["lengthened_document_length"] == 64 and len(result["injection"]) == 6
    own, longer = result["lengths"]
    assert 0 < own["tokens"] <= 12 and longer["tokens"] > 2 * own["tokens"]
    retriever, collection = retriever_of(model), load_collection(str(data))
    assert own["ndcg@10"] == pytest.approx(evaluate_collection(retriever, collection, 8)["ndcg@10"], abs=1e-6)
    _, pairs = measure(retriever, collection_task("data", collection, Settings()), Settings(times=[1], tokens=[5]), 8)
    for pair in pairs:
        assert len(pair.query_tokens) == len(pair.similarities)
    assert model[0].document_length == length and model.max_seq_length == (12 if length is None else 64)
