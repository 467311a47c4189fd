"""``fastmaxsim evaluate`` with models of Sentence Transformers 6, where PyLate is not installed."""

from __future__ import annotations

import json
from math import log2

import pytest

pytest.importorskip(
    "sentence_transformers.multi_vector_encoder", reason="no MultiVectorEncoder before Sentence Transformers 6"
)

import torch
from sentence_transformers import MultiVectorEncoder

from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.training.train import train
from tests.support.beir_folder import QUERIES, tables, write_folder
from tests.support.command_line import fastmaxsim
from tests.support.multi_vector_recipe import tiny_multi_vector
from tests.support.sparse_encoders import build_sparse_encoder
from tests.support.tiny_recipe import write


def ndcg(order: list[str], grades: dict[str, int]) -> float:
    def gain(values: list[int]) -> float:
        return sum(value / log2(rank + 2) for rank, value in enumerate(values[:10]))

    best = gain(sorted(grades.values(), reverse=True))
    return gain([grades.get(name, 0) for name in order]) / best if best else 0.0


@pytest.mark.e2e  # ranx compiles for seconds
def test_both_kinds_are_ranked_as_by_their_own_similarity(encoder, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    torch.manual_seed(0)
    model = MultiVectorEncoder(encoder("bert"), device="cpu", prompts={"query": "[Q] ", "document": "[D] "})
    model.save_pretrained(str(tmp_path / "late"))
    sparse = build_sparse_encoder(tmp_path / "sparse", encoder("bert"))
    data, rows = write_folder(tmp_path / "data"), tmp_path / "rows.jsonl"
    arguments = [
        "evaluate",
        tmp_path / "late",
        sparse,
        "--beir",
        data,
        "--per-query",
        rows,
        "--json",
        tmp_path / "json",
    ]
    done = fastmaxsim(list(map(str, arguments)))
    assert done.exit_code == 0, done.output
    written = json.loads((tmp_path / "json").read_text())
    assert [each["kind"] for each in written["models"]] == ["late interaction", "sparse"]
    content = tables()
    documents = model.encode_document([f"{row['title']} {row['text']}".strip() for row in content["corpus"]])
    queries = model.encode_query([row["text"] for row in content["queries"][:QUERIES]])
    found = [row for row in map(json.loads, rows.read_text().splitlines()) if row["model"] == "late"]
    for place, (scores, row) in enumerate(zip(model.similarity(queries, documents), found, strict=True)):
        order = [content["corpus"][each]["_id"] for each in scores.argsort(descending=True, stable=True).tolist()]
        grades = {each["corpus-id"]: each["score"] for each in content["qrels"] if each["query-id"] == f"q{place}"}
        assert row["ndcg@10"] == pytest.approx(ndcg(order, grades), abs=1e-6)


@pytest.mark.e2e
def test_a_recipe_has_the_metric_of_its_training(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    file = write(tmp_path, tiny_multi_vector(tmp_path, evaluation={"rows": 8}, training={"max_steps": 2}))
    trained = train(load_recipe(file))
    done = fastmaxsim(["evaluate", str(file), "--json", str(tmp_path / "result.json")])
    assert done.exit_code == 0, done.output
    (model,) = json.loads((tmp_path / "result.json").read_text())["models"]
    assert model["metrics"]["ndcg@10"] == pytest.approx(trained["ndcg@10"], abs=1e-6)
    assert (model["label"], model["kind"]) == ("tiny", "late interaction")
