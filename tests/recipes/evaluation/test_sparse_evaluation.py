"""Evaluation of a SparseEncoder on a collection: the ranking and the metrics of Sentence Transformers."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from sentence_transformers import SparseEncoder
from sentence_transformers.sparse_encoder.evaluation import SparseInformationRetrievalEvaluator

from pylate_fastmaxsim import TopK
from pylate_fastmaxsim.recipes.data.collection import Collection, RecipeData, document_texts, load_collection
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.evaluation import ranking
from pylate_fastmaxsim.recipes.evaluation.evaluate import evaluate
from pylate_fastmaxsim.recipes.evaluation.ranking import evaluate_collection, metrics_of, retrieve
from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.models.retriever import retriever_of
from tests.support.beir_folder import write_folder
from tests.support.sparse_encoders import build_sparse_encoder
from tests.support.tiny_recipe import tiny, write


@pytest.fixture(scope="module")
def saved(encoder, tmp_path_factory) -> str:
    return build_sparse_encoder(tmp_path_factory.mktemp("sparse"), encoder("bert"))


@pytest.fixture
def model(saved) -> SparseEncoder:
    return SparseEncoder(saved, device="cpu")


@pytest.fixture
def collection(tmp_path) -> Collection:
    return load_collection(str(write_folder(tmp_path / "data")))


def test_the_ranking_is_that_of_the_models_own_similarity(model, collection, monkeypatch):
    monkeypatch.setattr(ranking, "BATCHES_AT_ONCE", 3)  # several batches of documents
    # Of a route for each side and its prompt only encode_query and encode_document know.
    model.prompts = {"query": "rivers carry ", "document": "bees tell "}
    found, _ = retrieve(retriever_of(model), collection, batch_size=8)
    documents = model.encode_document(document_texts(collection.corpus[:]))
    scores = model.similarity(model.encode_query(list(collection.queries.values())), documents).to_dense()
    assert list(found) == list(collection.queries)
    for results, row in zip(found.values(), scores, strict=True):
        best = row.sort(descending=True, stable=True)
        assert list(results.values()) == pytest.approx(best.values[: ranking.DEPTH].tolist(), rel=1e-5)
        assert list(results)[:10] == [collection.corpus["_id"][place] for place in best.indices[:10].tolist()]


def test_what_shares_no_term_with_a_query_is_no_result(model, collection, monkeypatch):
    def few_terms(encode):
        def inner(texts, **options):
            vectors = encode(texts, **options).to_dense()
            vectors[:, 20:] = 0
            vectors[-1] = 0
            return vectors.to_sparse()

        return inner

    for name in ("encode_query", "encode_document"):
        monkeypatch.setattr(model, name, few_terms(getattr(model, name)))
    found, _ = retrieve(retriever_of(model), collection, batch_size=8)
    assert not found["q5"] and found["q0"] and not any("0149" in results for results in found.values())
    monkeypatch.setattr(model, "encode_query", lambda texts, **options: torch.zeros(len(texts), 207).to_sparse())
    metrics = evaluate_collection(retriever_of(model), collection, batch_size=8)
    assert [metrics[name] for name in ranking.METRICS] == [0.0] * 3 and metrics["query_nonzeros"] == 0.0


def test_a_pooling_and_negative_weights_are_refused(model, collection, monkeypatch):
    with pytest.raises(RecipeError, match="loss.pooling must be max for a sparse or static model"):
        retrieve(retriever_of(model), collection, 8, TopK(2))
    monkeypatch.setattr(model, "encode_query", lambda texts, **options: -torch.ones(len(texts), 207).to_sparse())
    with pytest.raises(RecipeError, match="The vectors of the sparse model cannot be searched: .*, got -1.0"):
        retrieve(retriever_of(model), collection, 8)


def test_a_model_that_diverged_has_no_metrics(model, collection, tmp_path, caplog):
    recipe = load_recipe(write(tmp_path, tiny(tmp_path)))
    with torch.no_grad():
        model[0].auto_model.cls.predictions.bias.fill_(torch.nan)
    found = evaluate(recipe, model, RecipeData(Dataset.from_list([]), collections=[collection]))
    assert found == dict.fromkeys(ranking.METRICS) and "NaN or infinite" in caplog.text


@pytest.mark.e2e  # ranx compiles for seconds
def test_metrics_are_those_of_sentence_transformers(model, collection, tmp_path):
    recipe = load_recipe(write(tmp_path, tiny(tmp_path)))
    found = evaluate(recipe, model, RecipeData(Dataset.from_list([]), collections=[collection]))
    texts = dict(zip(collection.corpus["_id"], document_texts(collection.corpus[:]), strict=True))
    # Its nDCG has two grades only.
    relevant = {
        query: {name for name, grade in grades.items() if grade} for query, grades in collection.judgements.items()
    }
    evaluator = SparseInformationRetrievalEvaluator(
        collection.queries, texts, relevant, ndcg_at_k=[10], mrr_at_k=[10], precision_recall_at_k=[100], write_csv=False
    )
    expected = {name.removeprefix("dot_"): value for name, value in evaluator(model).items()}
    assert {name: found[name] for name in ("mrr@10", "recall@100")} == pytest.approx(
        {name: expected[name] for name in ("mrr@10", "recall@100")}, abs=1e-9
    )
    two_grades = {query: dict.fromkeys(names, 1) for query, names in relevant.items()}
    graded = Collection(collection.corpus, collection.queries, two_grades)
    assert evaluate_collection(retriever_of(model), graded, 8)["ndcg@10"] == pytest.approx(
        expected["ndcg@10"], abs=1e-9
    )


@pytest.mark.e2e
def test_of_equal_scores_the_order_of_the_ranking_counts_and_a_query_without_results_counts_as_0():
    names = [f"d{row}" for row in range(100)]
    grades = {"q": {"d3": 1}, "none": {"d1": 1}}
    collection = Collection(Dataset.from_list([]), {"q": "", "none": "", "not judged": ""}, grades)
    found = {"q": dict.fromkeys(names, 1.0), "none": {}, "not judged": {"d1": 1.0}}
    assert metrics_of(found, collection, ["mrr@10"]) == {"mrr@10": pytest.approx(1 / 4 / 2)}
    both = metrics_of(found, collection, ["mrr@10", "recall@100"])
    assert both == pytest.approx({"mrr@10": 1 / 4 / 2, "recall@100": 1 / 2})
