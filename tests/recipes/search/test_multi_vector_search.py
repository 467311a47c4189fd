"""``fastmaxsim search`` with a MultiVectorEncoder of Sentence Transformers, where PyLate is not installed."""

from __future__ import annotations

import json

import pytest

pytest.importorskip(
    "sentence_transformers.multi_vector_encoder", reason="no MultiVectorEncoder before Sentence Transformers 6"
)

import torch
from sentence_transformers import MultiVectorEncoder

from pylate_fastmaxsim.recipes.models.load import load_retriever
from pylate_fastmaxsim.recipes.models.retriever import retriever_of
from tests.support.beir_folder import tables, write_folder
from tests.support.command_line import fastmaxsim


@pytest.fixture
def saved(encoder, tmp_path) -> str:
    torch.manual_seed(0)
    model = MultiVectorEncoder(encoder("bert"), device="cpu", prompts={"query": "[Q] ", "document": "[D] "})
    model.save_pretrained(str(tmp_path / "model"))
    return str(tmp_path / "model")


def search(*arguments: object) -> None:
    done = fastmaxsim(["search", *map(str, arguments)])
    assert done.exit_code == 0, done.output


def test_rankings_are_those_of_the_host_with_an_index_and_without(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    folder, result = write_folder(tmp_path / "data"), tmp_path / "result.json"
    files = ["--corpus", f"{folder}/corpus.jsonl", "--queries", f"{folder}/queries.jsonl", "--k", 20]
    search(saved, *files, "--run", tmp_path / "run", "--index", tmp_path / "index")
    search(saved, *files, "--run", tmp_path / "again", "--index", tmp_path / "index", "--json", result)
    search(saved, *files, "--run", tmp_path / "plain")
    written = json.loads(result.read_text())
    assert (written["kind"], written["encoded_documents"]) == ("late interaction", 0)
    content, model = tables(), MultiVectorEncoder(saved, device="cpu")
    names = [row["_id"] for row in content["corpus"]]
    documents = model.encode_document([f"{row['title']} {row['text']}".strip() for row in content["corpus"]])
    scores = model.similarity(model.encode_query([row["text"] for row in content["queries"]]), documents)
    for file in ("run", "again", "plain"):
        found = iter((tmp_path / file).read_text().splitlines())
        for query, row in zip(content["queries"], scores.tolist(), strict=True):
            lines = [next(found).split() for _ in range(20)]
            assert {line[0] for line in lines} == {query["_id"]}
            own = dict(zip(names, row, strict=True))
            assert [float(line[4]) for line in lines] == pytest.approx(sorted(row, reverse=True)[:20], rel=1e-5)
            assert all(float(line[4]) == pytest.approx(own[line[2]], rel=1e-5) for line in lines)


def test_an_index_knows_the_settings_of_its_model(saved):
    model = load_retriever(saved, "cpu")
    before = retriever_of(model).digest()
    assert retriever_of(load_retriever(saved, "cpu")).digest() == before
    model.prompts["document"] = "passage: "
    changed = retriever_of(model).digest()
    model[0].document_length = 12
    model[-2].skiplist_words = ["a"]
    assert len({before, changed, retriever_of(model).digest()}) == 3
