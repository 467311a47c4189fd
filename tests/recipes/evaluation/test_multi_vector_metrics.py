"""Metrics of a MultiVectorEncoder are those of Sentence Transformers' own evaluators."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sentence_transformers.multi_vector_encoder import evaluation

from pylate_fastmaxsim.recipes.data.collection import RecipeData
from pylate_fastmaxsim.recipes.evaluation import ranking
from pylate_fastmaxsim.recipes.evaluation.evaluate import NANO_BEIR_SETS, collection_of_set, evaluate, load_nano_beir
from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.models.load import kind_of, load_model
from pylate_fastmaxsim.recipes.models.retriever import retriever_of
from pylate_fastmaxsim.recipes.training.inputs import load_data, prepare
from tests.support.beir_folder import write_folder
from tests.support.multi_vector_recipe import tiny_multi_vector
from tests.support.tiny_recipe import text, write

TRIPLETS = [
    {"query": f"{i} {text(i, 5)}", "positive": f"{i} {text(i, 9)}", "negative": f"{50 + i} {text(i + 3, 12)}"}
    for i in range(40)
]
GRADED = [
    {"query": text(i, 4), "documents": [text(i + j, 5 + j) for j in range(3)], "scores": [3.0, 1.0 - i / 40, i / 20]}
    for i in range(24)
]


def evaluated(folder, rows, **sections):
    """The recipe, its data, its model, and what we find."""
    recipe = prepare(load_recipe(write(folder, tiny_multi_vector(folder, rows=rows, **sections))))
    data, model = load_data(recipe), load_model(recipe.model, "cpu", seed=0)
    return recipe, data, model, evaluate(recipe, model, data)


def test_held_out_triplets(tmp_path):
    _, data, model, found = evaluated(tmp_path, TRIPLETS)
    rows = data.held_out[:]
    triplets = evaluation.MultiVectorTripletEvaluator(
        rows["query"], rows["positive"], rows["negative"], write_csv=False
    )
    retrieval = evaluation.MultiVectorInformationRetrievalEvaluator(
        {f"q{row}": query for row, query in enumerate(rows["query"])},
        {f"{kind}{row}": each for kind in ("positive", "negative") for row, each in enumerate(rows[kind])},
        {f"q{row}": {f"positive{row}"} for row in range(len(data.held_out))},
        write_csv=False,
    )
    expected = {"accuracy": next(iter(triplets(model).values())), "ndcg@10": retrieval(model)["maxsim_ndcg@10"]}
    assert found == pytest.approx(expected, rel=1e-5) and 0 < found["ndcg@10"] < 1


def test_held_out_teacher_scores(tmp_path):
    loss = {"name": "distillation", "temperature": 0.5}
    _, data, model, found = evaluated(tmp_path, GRADED, loss=loss, evaluation={"rows": 12})
    rows = data.held_out[:]
    evaluator = evaluation.MultiVectorDistillationEvaluator(*rows.values(), temperature=0.5, write_csv=False)
    assert found["kl_divergence"] == pytest.approx(evaluator(model)["kl_divergence"], rel=1e-5)
    assert 0 < found["ndcg@10"] <= 1


def test_a_collection_and_sets_of_nano_beir(tmp_path):
    sections = {"evaluation": {"rows": 0, "beir": str(write_folder(tmp_path / "data")), "batch_size": 4}}
    recipe, data, model, found = evaluated(tmp_path, TRIPLETS, **sections)
    assert (
        found == ranking.evaluate_collection(retriever_of(model), data.collections[0], 4) and 0 < found["ndcg@10"] < 1
    )
    # A set has the metrics of the same collection. It has no titles and no grades.
    (collection,) = data.collections
    texts = collection.corpus[:]
    part = SimpleNamespace(
        queries=list(collection.queries.values()),
        queries_ids=list(collection.queries),
        corpus=texts["text"],
        corpus_ids=texts["_id"],
        relevant_docs={query: {d for d, grade in own.items() if grade} for query, own in collection.judgements.items()},
    )
    nano = evaluate(recipe, model, RecipeData(None, collections=[collection_of_set(part)] * 2))
    assert list(nano) == list(ranking.METRICS) and 0 < nano["ndcg@10"] <= 1


def test_sets_of_nano_beir_are_loaded_by_the_host(tmp_path, monkeypatch):
    loaded = []

    def load(self, name, **options):
        loaded.append((name, options["batch_size"], options["precision_recall_at_k"]))
        return SimpleNamespace(
            queries=["q"], queries_ids=["1"], corpus=["d"], corpus_ids=["2"], relevant_docs={"1": {"2"}}
        )

    monkeypatch.setattr(evaluation.MultiVectorNanoBEIREvaluator, "_load_dataset", load)
    content = tiny_multi_vector(tmp_path, evaluation={"rows": 0, "nano_beir": ["nq", "SciFact"]})
    recipe = load_recipe(write(tmp_path, content))
    assert len(load_nano_beir(recipe, kind_of(recipe.model))) == 2
    assert [name for name, *_ in loaded] == ["nq", "SciFact"] and loaded[0][2] == [100]
    # The names that a recipe may give are those that the host has.
    monkeypatch.undo()
    from sentence_transformers.sentence_transformer.evaluation import nano_beir

    assert set(NANO_BEIR_SETS) == set(nano_beir.DATASET_NAME_TO_HUMAN_READABLE)


def test_embeddings_that_are_not_finite_have_no_metrics(tmp_path):
    recipe, data, model, _ = evaluated(tmp_path, TRIPLETS)
    model[1].linear.weight.data.fill_(float("nan"))
    assert evaluate(recipe, model, data) == {"ndcg@10": None, "accuracy": None}
