"""The metrics of a recipe are those that PyLate's own evaluators have for the saved model."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

pytest.importorskip("datasets")
pytest.importorskip("pylate")
pytest.importorskip("matplotlib")

import datasets
import torch
from datasets import Dataset
from pylate import evaluation
from pylate.evaluation import colbert_distillation
from pylate.evaluation.nano_beir_evaluator import MAPPING_DATASET_NAME_TO_ID
from pylate.models import ColBERT
from rich.console import Console

import pylate_fastmaxsim
from pylate_fastmaxsim.cli.tables import training_table
from pylate_fastmaxsim.comparison.report import comparison_table, write_pictures
from pylate_fastmaxsim.comparison.verdict import contrast
from pylate_fastmaxsim.recipes.config.schema import Recipe
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.evaluation.evaluate import collection_of, evaluate, evaluate_held_out
from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.models.retriever import retriever_of
from pylate_fastmaxsim.recipes.plugin import plugin_of
from pylate_fastmaxsim.recipes.pooling import final_pooling
from pylate_fastmaxsim.recipes.training.inputs import load_data, prepare
from pylate_fastmaxsim.recipes.training.train import train
from tests.support.comparisons import summarized
from tests.support.tiny_recipe import hub_dataset, text, tiny, write

ROWS = 40
HELD_OUT = 12
SETS = ("msmarco", "nq")
NANO_BEIR_METRICS = ("ndcg@10", "mrr@10", "recall@100")


def triplets() -> list[dict]:
    return [
        {
            "query": text(i, 4),
            "positive": f"{text(i, 4 + i % 17)} number {i}",
            "negative": text(i * 5 + 3, 3 + i % 9),
            "negative_2": text(i, 4),  # as good as a positive can be: were it the negative, no triplet would be right
        }
        for i in range(ROWS)
    ]


def taught() -> list[dict]:
    # Integers, which neither PyLate's loss nor its evaluator takes as they are.
    return [
        {
            "query": text(i, 4),
            "documents": [f"{text(i + j, 3 + (i * j) % 11)} {i}" for j in range(3)],
            "scores": [i % 3, 3, 1],
        }
        for i in range(ROWS)
    ]


def recipe_of(folder: Path, rows: list[dict], **sections) -> Recipe:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = tiny(folder, data={"files": [str(file)]}, **({"evaluation": {"rows": HELD_OUT}} | sections))
    recipe["training"] |= {"max_steps": 4}
    return load_recipe(write(folder, recipe), ["fast.enabled=true"])


def cells(result: dict) -> dict[str, str]:
    return dict(training_table(result).rows)


@pytest.mark.parametrize("pooling", ["max", {"softmax": 0.1}])
def test_held_out_triplets_have_the_metrics_of_pylate(pooling, tmp_path):
    rows = triplets()
    for row in rows[::3]:  # which the model gets wrong
        row["positive"], row["negative"] = row["negative"], row["positive"]
    recipe = recipe_of(tmp_path, rows, loss={"pooling": pooling})
    result = train(recipe)
    data = load_data(prepare(recipe))
    rows = data.held_out[:]
    model = ColBERT(result["model"], device="cpu")
    evaluator = evaluation.ColBERTTripletEvaluator(rows["query"], rows["positive"], rows["negative"], write_csv=False)
    collection = collection_of(recipe, data.held_out)
    retrieval = evaluation.PyLateInformationRetrievalEvaluator(
        collection.queries,
        dict(zip(collection.corpus["_id"], collection.corpus["text"], strict=True)),
        {query: set(judged) for query, judged in collection.judgements.items()},
        write_csv=False,
    )
    with pylate_fastmaxsim.enabled(pooling=final_pooling(recipe.loss.pooling)):
        expected = {"ndcg@10": retrieval(model)[retrieval.primary_metric], "accuracy": evaluator(model)["accuracy"]}
    assert 0 < expected["accuracy"] < 1
    assert {name: result[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert cells(result)["Triplet accuracy"] == f"{expected['accuracy']:.4f}"
    with plugin_of(recipe.fast):
        assert evaluate(recipe, model, data) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("normalize", [None, False])
def test_the_divergence_is_that_of_pylate(normalize, tmp_path, monkeypatch):
    recipe = recipe_of(tmp_path, taught(), loss={"name": "distillation", "normalize_scores": normalize})
    result = train(recipe)
    rows = load_data(prepare(recipe)).held_out[:]
    model = ColBERT(result["model"], device="cpu")
    expected = {}

    def without_padding(queries_embeddings, documents_embeddings):
        """PyLate lets the rows of zeros win that it pads documents with."""
        similarities = torch.einsum("ash,abth->abst", queries_embeddings, documents_embeddings)
        padding = (documents_embeddings == 0).all(-1)[:, :, None]
        return similarities.masked_fill(padding, -torch.inf).max(-1).values.sum(-1)

    monkeypatch.setattr(colbert_distillation, "colbert_kd_scores", without_padding)
    for option in (True, False):
        evaluator = evaluation.ColBERTDistillationEvaluator(
            rows["query"],
            rows["documents"],
            rows["scores"],
            write_csv=False,
            normalize_scores=option,
        )
        expected[option] = evaluator(model)["kl_divergence"]
    assert expected[True] != pytest.approx(expected[False], rel=0.01)
    divergence = expected[normalize is not False]  # PyLate normalizes where nothing is said, as its loss does
    assert result["kl_divergence"] == pytest.approx(divergence, rel=1e-6) and "accuracy" not in result
    assert cells(result)["KL divergence"] == f"{result['kl_divergence']:.4f}"


def model_of(recipe: Recipe) -> ColBERT:
    return ColBERT(prepare(recipe).model.name_or_path, device="cpu", query_length=8, document_length=24)


@pytest.mark.parametrize("kind", ["triplets", "distillation"])
def test_texts_that_occur_in_several_held_out_rows_count_once(kind, tmp_path):
    rows, loss = {"triplets": (triplets(), "contrastive"), "distillation": (taught(), "distillation")}[kind]
    recipe = recipe_of(tmp_path, rows, loss={"name": loss})
    model = model_of(recipe)
    once = load_data(prepare(recipe)).held_out
    thrice = Dataset.from_list([row for row in once for _ in range(3)])
    expected = evaluate_held_out(recipe, retriever_of(model), once)
    assert 0 < expected["ndcg@10"] < 1 and len(expected) == 2
    assert evaluate_held_out(recipe, retriever_of(model), thrice) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", ["pairs", "triplets", "distillation", "nano_beir"])
def test_a_model_of_nan_has_no_metrics(kind, tmp_path, nano_beir, caplog):
    rows = taught() if kind == "distillation" else triplets()
    rows = [{key: row[key] for key in ("query", "positive")} for row in rows] if kind == "pairs" else rows
    sections = {
        "distillation": {"loss": {"name": "distillation"}},
        "nano_beir": {"evaluation": {"rows": 0, "nano_beir": list(SETS)}},
    }
    recipe = recipe_of(tmp_path, rows, **sections.get(kind, {}))
    data, model = load_data(prepare(recipe)), model_of(recipe)
    with plugin_of(recipe.fast):
        sound = evaluate(recipe, model, data)
        model.model_card_data.eval_results_dict.clear()
        with torch.no_grad():  # as after a training that diverged
            model[-1].linear.weight[0, 0] = torch.nan
        metrics = evaluate(recipe, model, data)
    assert None not in sound.values() and metrics == dict.fromkeys(sound)
    assert ("accuracy" in sound, "kl_divergence" in sound) == (kind == "triplets", kind == "distillation")
    assert "The evaluation has no metrics: embeddings of the model are NaN" in caplog.messages[-1]
    assert not model.model_card_data.eval_results_dict and "encode" not in vars(model)


def test_a_comparison_in_which_one_run_diverged_shows_what_there_is(tmp_path):
    result = {"status": "finished", "memory": {"before": 100, "peak": 200}, "warnings": ["said twice"]}
    step = {"seconds": 1.0, "loss": 0.5, "documents": 8, "live": 40, "encoded": 50, "query_tokens": 5}
    stock, fast = (summarized({**result, "ndcg@10": quality}, [step] * 3) for quality in (None, 0.25))
    stock["warnings"] = [*stock["warnings"], "no metrics"]
    summary = contrast(stock, fast)
    assert summary["ndcg@10_difference"] is None
    wall = {"wall_seconds": {"stock": 2.0, "fast": 1.0, "whole": 4.0}}  # what compare adds
    comparison = {"recipe": {"name": "x"}, "runs": {"stock": stock, "fast": fast}, "summary": summary | wall}
    out = io.StringIO()
    Console(file=out, width=200).print(comparison_table(comparison))
    write_pictures(comparison, tmp_path / "compare.json")
    page = (tmp_path / "compare.html").read_text()
    assert "0.2500" in page and "0.2500" in out.getvalue()
    assert "both runs: said twice" in page and "stock run: no metrics" in page


def test_a_held_out_query_has_the_relevant_documents_of_all_its_rows(tmp_path):
    recipe = recipe_of(tmp_path, triplets())
    rows = Dataset.from_list(
        [
            {"query": "a", "positive": "first", "negative": "other"},
            {"query": "b", "positive": "other", "negative": "second"},
            {"query": "a", "positive": "second", "negative": "third"},
        ]
    )
    collection = collection_of(recipe, rows)
    # Without repeated texts they are numbered by row.
    assert collection.queries == {"q0": "a", "q1": "b"}
    ids = ["d0-0", "d0-1", "d1-1", "d2-1"]
    assert collection.corpus[:] == {"_id": ids, "text": ["first", "other", "second", "third"]}
    assert collection.judgements == {"q0": {"d0-0": 1, "d1-1": 1}, "q1": {"d0-1": 1}}
    taught_rows = Dataset.from_list(
        [
            {"query": "a", "documents": ["first", "other"], "scores": [2.0, 1.0]},
            {"query": "a", "documents": ["other", "second"], "scores": [0.5, 0.7]},
            {"query": "b", "documents": ["second", "first"], "scores": [0.0, 1.0]},
        ]
    )
    recipe = recipe_of(tmp_path, taught(), loss={"name": "distillation"})
    collection = collection_of(recipe, taught_rows)
    assert (collection.queries, collection.corpus["text"][:]) == ({"q0": "a", "q2": "b"}, ["first", "other", "second"])
    assert collection.judgements == {"q0": {"d0-0": 1, "d1-1": 1}, "q2": {"d0-0": 1}}


@pytest.fixture
def nano_beir(tmp_path, monkeypatch) -> Path:
    """Two sets laid out as those on the Hub, where PyLate looks for them."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for number, name in enumerate(SETS):
        documents = 130 + 40 * number
        subsets = {
            "corpus": [{"_id": f"d{row}", "text": f"{text(row, 1 + row % 23)} {row}"} for row in range(documents)],
            "queries": [{"_id": f"q{row}", "text": text(row * 3 + number, 5)} for row in range(6)],
            "qrels": [
                {"query-id": f"q{row}", "corpus-id": f"d{(row * 31 + step * 17) % documents}"}
                for row in range(6)
                for step in range(9)
            ],
        }
        monkeypatch.setitem(MAPPING_DATASET_NAME_TO_ID, name, str(hub_dataset(tmp_path / f"Nano{number}", **subsets)))
    return tmp_path


def means(model: ColBERT, *names: str) -> dict[str, float]:
    """What PyLate says by itself."""
    metrics = evaluation.NanoBEIREvaluator(list(names), precision_recall_at_k=[100], write_csv=False)(model)
    return {name: metrics[f"NanoBEIR_mean_MaxSim_{name}"] for name in NANO_BEIR_METRICS}


def test_nano_beir_is_that_of_pylate(nano_beir):
    recipe = recipe_of(nano_beir, triplets(), evaluation={"rows": 0, "nano_beir": ["nq"]})
    assert len(load_data(prepare(recipe)).train) == ROWS
    result = train(recipe)
    model = ColBERT(result["model"], device="cpu")
    expected = means(model, "nq")
    assert all(0 < value < 1 for value in expected.values())
    assert {name: result[name] for name in NANO_BEIR_METRICS} == pytest.approx(expected, abs=1e-6)
    assert {"nDCG@10", "MRR@10", "Recall@100"} <= cells(result).keys()
    # Other sets are no other training, and a name may be written as the set is called.
    both = load_recipe(nano_beir / "tiny.yaml", ["fast.enabled=true", "evaluation.nano_beir=[NQ, msmarco]"])
    again = train(both)
    assert again["resumed_from"] == "checkpoint-4" and again["losses"] == result["losses"]
    assert {name: again[name] for name in NANO_BEIR_METRICS} == pytest.approx(means(model, *SETS), abs=1e-6)


@pytest.mark.parametrize("value", ["[nq, ms_marco]", "[nq, NQ]", "[]"])
def test_sets_are_names_of_sets(value, tmp_path):
    recipe = write(tmp_path, tiny(tmp_path, evaluation={"rows": 0}))
    with pytest.raises(RecipeError, match="^evaluation.nano_beir must "):
        load_recipe(recipe, [f"evaluation.nano_beir={value}"])
    for other in ("rows: 4", "beir: some/data"):
        with pytest.raises(RecipeError, match="at most one of rows, beir and nano_beir"):
            load_recipe(recipe, [f"evaluation={{{other}, nano_beir: [nq]}}"])


def test_sets_that_cannot_be_loaded_are_one_sentence_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    recipe = load_recipe(write(tmp_path, tiny(tmp_path, evaluation={"rows": 0})), ["evaluation.nano_beir=[nq]"])
    with pytest.raises(RecipeError, match="^evaluation.nano_beir cannot be loaded: .*zeta-alpha-ai/NanoNQ"):
        train(recipe)
    assert not (tmp_path / "out").exists()
