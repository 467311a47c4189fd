"""Evaluation of a SPLADE: its metrics and its sparsity are those of dense vectors and plain sums."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch
from sentence_transformers import SparseEncoder
from torch.nn import functional as F

from pylate_fastmaxsim.recipes.data.collection import RecipeData, document_texts, load_collection
from pylate_fastmaxsim.recipes.evaluation import ranking
from pylate_fastmaxsim.recipes.evaluation.evaluate import collection_of_set, evaluate
from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.training.inputs import load_data
from tests.support.beir_folder import write_folder
from tests.support.sparse_encoders import build_sparse_encoder
from tests.support.splade_recipe import splade_over
from tests.support.tiny_recipe import text, write


@pytest.fixture(scope="module")
def saved(encoder, tmp_path_factory) -> str:
    return build_sparse_encoder(tmp_path_factory.mktemp("sparse"), encoder("bert"))


@pytest.fixture
def model(saved) -> SparseEncoder:
    model = SparseEncoder(saved, device="cpu")
    # Of a route for each side and its prompt only encode_query and encode_document know.
    model.prompts = {"query": "rivers carry ", "document": "bees tell "}
    return model


def dense(model: SparseEncoder, queries: list[str], documents: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    return model.encode_query(queries).to_dense().double(), model.encode_document(documents).to_dense().double()


def plain_sparsity(queries: torch.Tensor, documents: torch.Tensor) -> dict[str, float]:
    products = [int(((query != 0) & (document != 0)).sum()) for query in queries for document in documents]
    return {
        "flops": sum(products) / len(products),
        "query_nonzeros": (queries != 0).sum().item() / len(queries),
        "document_nonzeros": (documents != 0).sum().item() / len(documents),
    }


def of_recipe(tmp_path, saved: str, rows: list[dict], **sections):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"files": [str(tmp_path / "rows.jsonl")]}
    return load_recipe(write(tmp_path, splade_over(tmp_path, saved, data=data, **sections)))


def test_flops_are_the_mean_number_of_products_of_a_query_and_a_document(model, saved, tmp_path, monkeypatch):
    monkeypatch.setattr(ranking, "BATCHES_AT_ONCE", 3)  # several batches of documents
    monkeypatch.setattr(ranking, "metrics_of", lambda found, collection: {"found": float(len(found))})
    collection = load_collection(str(write_folder(tmp_path / "data")))
    recipe = load_recipe(write(tmp_path, splade_over(tmp_path, saved)))
    found = evaluate(recipe, model, RecipeData(None, collections=[collection]))
    vectors = dense(model, list(collection.queries.values()), document_texts(collection.corpus[:]))
    assert found == pytest.approx({"found": len(collection.queries), **plain_sparsity(*vectors)}, rel=1e-12)


@pytest.mark.e2e  # ranx compiles for seconds
def test_held_out_rows_have_the_metrics_of_their_dense_scores(model, saved, tmp_path):
    triplets = [{"query": text(i, 4), "positive": text(i, 9), "negative": text(i + 1, 12)} for i in range(20)]
    recipe = of_recipe(tmp_path, saved, triplets, evaluation={"rows": 12})
    held_out = load_data(recipe).held_out
    found = evaluate(recipe, model, RecipeData(None, held_out))
    texts = list(dict.fromkeys([*held_out["positive"], *held_out["negative"]]))
    queries, documents = dense(model, list(dict.fromkeys(held_out["query"])), texts)
    relevant = {query: set() for query in dict.fromkeys(held_out["query"])}
    for row in held_out:
        relevant[row["query"]].add(texts.index(row["positive"]))
    gains = []
    for scores, own in zip(queries @ documents.T, relevant.values(), strict=True):
        order = scores.argsort(descending=True).tolist()[:10]
        gain = sum(1 / math.log2(place + 2) for place, document in enumerate(order) if document in own)
        gains.append(gain / sum(1 / math.log2(place + 2) for place in range(min(10, len(own)))))
    own = [dense(model, [row["query"]], [row["positive"], row["negative"]]) for row in held_out]
    right = sum(bool((query @ pair.T)[0, 0] > (query @ pair.T)[0, 1]) for query, pair in own)
    expected = {"ndcg@10": sum(gains) / len(gains), "accuracy": right / len(held_out)}
    assert found == pytest.approx(expected | plain_sparsity(queries, documents), rel=1e-6)
    # A set of NanoBEIR has the same metrics as the same collection.
    ids = {name: [f"{name}{place}" for place in range(len(all_))] for name, all_ in (("q", relevant), ("d", texts))}
    part = SimpleNamespace(
        queries=list(relevant),
        queries_ids=ids["q"],
        corpus=texts,
        corpus_ids=ids["d"],
        relevant_docs={
            query: {f"d{place}" for place in own} for query, own in zip(ids["q"], relevant.values(), strict=True)
        },
    )
    nano = evaluate(recipe, model, RecipeData(None, collections=[collection_of_set(part)] * 2))
    assert list(nano) == [*ranking.METRICS, *ranking.SPARSITY]
    assert {name: nano[name] for name in found if name in nano} == pytest.approx(
        {name: value for name, value in found.items() if name in nano}, rel=1e-6
    )


@pytest.mark.e2e
def test_held_out_teacher_scores_are_compared_by_their_softmax(model, saved, tmp_path):
    rows = [
        {"query": text(i, 4), "documents": [text(i + j, 5 + j) for j in range(3)], "scores": [0.3, 2.0 - i / 9, 1.0]}
        for i in range(12)
    ]
    recipe = of_recipe(tmp_path, saved, rows, evaluation={"rows": 8}, loss={"name": "distillation"})
    held_out = load_data(recipe).held_out
    found = evaluate(recipe, model, RecipeData(None, held_out))
    scores = torch.stack(
        [(q @ d.T)[0] for q, d in (dense(model, [row["query"]], row["documents"]) for row in held_out)]
    )
    teacher = torch.tensor(held_out["scores"], dtype=torch.float64).softmax(1)
    assert found["kl_divergence"] == pytest.approx(
        float(F.kl_div(scores.log_softmax(1), teacher, reduction="batchmean")), rel=1e-5
    )
    # The teacher's best is the relevant one.
    assert {"ndcg@10", *ranking.SPARSITY} < set(found) and 0 < found["ndcg@10"] <= 1


def test_a_model_that_diverged_has_no_metrics(model, saved, tmp_path, caplog):
    with torch.no_grad():
        model[0].auto_model.cls.predictions.bias.fill_(torch.nan)
    rows = [{"query": text(i, 4), "positive": text(i, 9), "negative": text(i + 1, 12)} for i in range(6)]
    recipe = of_recipe(tmp_path, saved, rows, evaluation={"rows": 2})
    found = evaluate(recipe, model, RecipeData(None, load_data(recipe).held_out))
    assert found == dict.fromkeys(("ndcg@10", "accuracy", *ranking.SPARSITY)) and "NaN or infinite" in caplog.text
