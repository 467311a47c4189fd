"""PyLate's evaluators at the end of a recipe: what they say of the saved model when they are called by hand."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("datasets")
pytest.importorskip("pylate")
pytest.importorskip("matplotlib")

import datasets
import torch
from datasets import Dataset
from pylate import evaluation
from pylate.evaluation.nano_beir_evaluator import MAPPING_DATASET_NAME_TO_ID
from pylate.models import ColBERT
from rich.console import Console
from test_beir import write_folder
from tiny_recipe import hub_dataset, text, tiny, write

from pylate_fastmaxsim.recipes.comparison.compare import contrast, read_steps, summarize
from pylate_fastmaxsim.recipes.comparison.html import write_html
from pylate_fastmaxsim.recipes.comparison.measure import measure
from pylate_fastmaxsim.recipes.comparison.report import METRICS, comparison_table, training_table
from pylate_fastmaxsim.recipes.config.schema import Recipe
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.evaluation import held_out
from pylate_fastmaxsim.recipes.evaluation.evaluate import evaluate
from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.plugin import switched
from pylate_fastmaxsim.recipes.training.inputs import load_data
from pylate_fastmaxsim.recipes.training.prepare import prepare
from pylate_fastmaxsim.recipes.training.train import train

ROWS = 40
HELD_OUT = 12
SETS = ("msmarco", "nq")
NANO_BEIR_METRICS = ("ndcg@10", "mrr@10", "recall@100")
WALL = {"wall_seconds": {"stock": 2.0, "fast": 1.0, "whole": 4.0}}  # what compare adds to a summary


def triplets() -> list[dict]:
    return [
        {
            "query": text(i, 4),
            "positive": f"{text(i, 4 + i % 17)} number {i}",
            "negative": text(i * 5 + 3, 3 + i % 9),
            "second": text(i, 4),  # as good as a positive can be: were it the negative, no triplet would be right
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
    table = training_table(result)
    return dict(zip(*(column.cells for column in table.columns), strict=True))


@pytest.mark.parametrize(("loss", "negatives"), [("contrastive", 2), ("cached_contrastive", 1)])
def test_accuracy_is_that_of_held_out_triplets(loss, negatives, tmp_path, calls):
    rows = [dict(list(row.items())[: 2 + negatives]) for row in triplets()]
    for row in rows[::3]:  # which the model gets wrong
        row["positive"], row["negative"] = row["negative"], row["positive"]
    recipe = recipe_of(tmp_path, rows, loss={"name": loss})
    result = train(recipe)
    assert json.loads((tmp_path / "out" / "train.json").read_text()) == result
    rows = load_data(prepare(recipe)).held_out[:]
    model = ColBERT(result["model"], device="cpu")
    evaluator = evaluation.ColBERTTripletEvaluator(rows["query"], rows["positive"], rows["negative"], write_csv=False)
    calls.clear()
    expected = evaluator(model)["accuracy"]
    assert 0 < expected < 1 and not calls
    assert result["accuracy"] == expected and "kl_divergence" not in result
    assert cells(result)["Triplet accuracy"] == f"{expected:.4f}"
    with switched(recipe.fast):
        again = evaluate(recipe, model, load_data(prepare(recipe)))
    assert again == {"ndcg@10": result["ndcg@10"], "accuracy": expected}
    assert len(calls) == 3  # the documents of the retrieval, the positives and the negatives


def test_rows_without_a_negative_have_no_accuracy(tmp_path):
    result = train(recipe_of(tmp_path, [{key: row[key] for key in ("query", "positive")} for row in triplets()]))
    assert result["ndcg@10"] > 0 and not {"accuracy", "kl_divergence"} & result.keys()


@pytest.mark.parametrize("normalize", [None, True, False])
def test_the_divergence_is_that_of_held_out_rows(normalize, tmp_path, calls, monkeypatch):
    recipe = recipe_of(tmp_path, taught(), loss={"name": "distillation", "normalize_scores": normalize})
    result = train(recipe)
    data = load_data(prepare(recipe))
    rows = data.held_out[:]
    model = ColBERT(result["model"], device="cpu")
    expected = {}
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
    assert result["kl_divergence"] == pytest.approx(divergence, rel=1e-4) and "accuracy" not in result
    assert cells(result)["KL divergence"] == f"{result['kl_divergence']:.4f}"
    # Five rows at a time of 12, each of 3 documents.
    monkeypatch.setattr(held_out, "EVALUATION_SIMILARITIES", 5 * 3 * model.query_length * model.document_length)
    calls.clear()
    model.model_card_data.eval_results_dict.clear()
    stock = held_out.kl_divergence(recipe, data.held_out, model)
    assert stock == pytest.approx(divergence, rel=1e-4) and not calls
    # Of three parts the card says one thing: all of them together.
    assert list(model.model_card_data.eval_results_dict.values()) == [{"held-out_kl_divergence": stock}]
    with switched(recipe.fast):
        assert held_out.kl_divergence(recipe, data.held_out, model) == pytest.approx(divergence, rel=1e-4)
    assert len(calls) == 3


def model_of(recipe: Recipe) -> ColBERT:
    return ColBERT(prepare(recipe).model.name_or_path, device="cpu", query_length=8, document_length=24)


@pytest.mark.parametrize("kind", ["triplets", "distillation"])
def test_texts_that_occur_in_several_held_out_rows_count_once(kind, tmp_path):
    rows, loss = {"triplets": (triplets(), "contrastive"), "distillation": (taught(), "distillation")}[kind]
    recipe = recipe_of(tmp_path, rows, loss={"name": loss})
    model = model_of(recipe)
    once = load_data(prepare(recipe)).held_out
    thrice = Dataset.from_list([row for row in once for _ in range(3)])
    expected = held_out.evaluate_held_out(recipe, model, once)
    assert 0 < expected["ndcg@10"] < 1 and len(expected) == 2
    assert held_out.evaluate_held_out(recipe, model, thrice) == pytest.approx(expected, rel=1e-5)


def lost(model: ColBERT) -> ColBERT:
    """The same after a training that diverged."""
    with torch.no_grad():
        model[-1].linear.weight[0, 0] = torch.nan
    return model


@pytest.mark.parametrize("kind", ["pairs", "triplets", "distillation", "beir", "nano_beir"])
@pytest.mark.parametrize("fast", [False, True])
def test_a_model_of_nan_has_no_metrics(fast, kind, tmp_path, nano_beir, caplog):
    rows = taught() if kind == "distillation" else triplets()
    rows = [{key: row[key] for key in ("query", "positive")} for row in rows] if kind == "pairs" else rows
    sections = {
        "distillation": {"loss": {"name": "distillation"}},
        "beir": {"evaluation": {"rows": 0, "beir": str(write_folder(tmp_path / "beir"))}},
        "nano_beir": {"evaluation": {"rows": 0, "nano_beir": list(SETS)}},
    }
    recipe = recipe_of(tmp_path, rows, **sections.get(kind, {}))
    recipe = replace(recipe, fast=replace(recipe.fast, enabled=fast))
    data, model = load_data(prepare(recipe)), model_of(recipe)
    with switched(recipe.fast):
        sound = evaluate(recipe, model, data)
        model.model_card_data.eval_results_dict.clear()
        caplog.clear()
        metrics = evaluate(recipe, lost(model), data)
    assert None not in sound.values() and metrics == dict.fromkeys(sound)
    assert caplog.messages[-1:] == [
        "The evaluation has no metrics: embeddings of the model are NaN or infinite, as after a training that diverged."
    ]
    assert not model.model_card_data.eval_results_dict and "encode" not in vars(model)


def test_a_comparison_in_which_one_run_diverged_shows_what_there_is(tmp_path):
    result = {"status": "finished", "memory": {"before": 100, "peak": 200}, "warnings": ["said twice"]}
    step = {"seconds": 1.0, "loss": 0.5, "documents": 8, "live": 40, "encoded": 50, "query_tokens": 5}
    stock, fast = (summarize({**result, "ndcg@10": quality}, [step] * 3) for quality in (None, 0.25))
    fast["untrained"] = {"ndcg@10": 0.125}
    stock["warnings"] = [*stock["warnings"], "no metrics"]
    for runs in ({"stock": stock, "fast": fast}, {"stock": stock, "fast": fast | {"ndcg@10": None}}):
        assert contrast(runs["stock"], runs["fast"])["ndcg@10_difference"] is None
        comparison = {"recipe": {"name": "x"}, "runs": runs, "summary": contrast(runs["stock"], runs["fast"]) | WALL}
        out = io.StringIO()
        Console(file=out, width=200).print(comparison_table(comparison))
        write_html(comparison, tmp_path / "compare.html")
        page = (tmp_path / "compare.html").read_text()
        assert "0.1250" in page and "0.1250" in out.getvalue() and "nDCG@10" in page
        assert ("0.2500" in page) == (runs["fast"]["ndcg@10"] is not None)
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
    evaluator = held_out.retrieval_evaluator(recipe, rows, model_of(recipe))
    assert (evaluator.queries, evaluator.corpus) == (["a", "b"], ["first", "other", "second", "third"])
    # Without repeated texts they are numbered by row, and PyLate goes by the number where scores are equal.
    assert (evaluator.queries_ids, evaluator.corpus_ids) == (["q0", "q1"], ["d0-0", "d0-1", "d1-1", "d2-1"])
    assert evaluator.relevant_docs == {"q0": {"d0-0", "d1-1"}, "q1": {"d0-1"}}
    taught_rows = Dataset.from_list(
        [
            {"query": "a", "documents": ["first", "other"], "scores": [2.0, 1.0]},
            {"query": "a", "documents": ["other", "second"], "scores": [0.5, 0.7]},
            {"query": "b", "documents": ["second", "first"], "scores": [0.0, 1.0]},
        ]
    )
    recipe = recipe_of(tmp_path, taught(), loss={"name": "distillation"})
    evaluator = held_out.retrieval_evaluator(recipe, taught_rows, model_of(recipe))
    assert (evaluator.queries, evaluator.corpus) == (["a", "b"], ["first", "other", "second"])
    assert evaluator.relevant_docs == {"q0": {"d0-0", "d1-1"}, "q2": {"d0-0"}}


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


def test_nano_beir_is_that_of_pylate(nano_beir, calls):
    recipe = recipe_of(nano_beir, triplets(), evaluation={"rows": 0, "nano_beir": ["nq"]})
    assert len(load_data(prepare(recipe)).train) == ROWS
    result = train(recipe)
    model = ColBERT(result["model"], device="cpu")
    calls.clear()
    expected = means(model, "nq")
    assert not calls and all(0 < value < 1 for value in expected.values())
    assert {name: result[name] for name in NANO_BEIR_METRICS} == pytest.approx(expected, abs=1e-6)
    assert {"nDCG@10", "MRR@10", "Recall@100"} <= cells(result).keys()
    # Other sets are no other training, and a name may be written as the set is called.
    both = load_recipe(nano_beir / "tiny.yaml", ["fast.enabled=true", "evaluation.nano_beir=[NQ, msmarco]"])
    again = train(both)
    assert again["resumed_from"] == "checkpoint-4" and again["losses"] == result["losses"]
    mean = means(model, *SETS)
    assert {name: again[name] for name in NANO_BEIR_METRICS} == pytest.approx(mean, abs=1e-6)
    assert mean["ndcg@10"] != pytest.approx(expected["ndcg@10"], rel=1e-3)


def test_nano_beir_is_scored_in_parts_that_fit(nano_beir, calls, monkeypatch):
    recipe = recipe_of(nano_beir, triplets(), evaluation={"rows": 0, "nano_beir": list(SETS)})
    data = load_data(prepare(recipe))
    model = model_of(recipe)
    monkeypatch.setattr(held_out, "EVALUATION_SIMILARITIES", 50 * 6 * 8 * 24)
    with switched(recipe.fast):
        fast = evaluate(recipe, model, data)
    assert len(calls) == 3 + 4  # 130 and 170 documents, 50 at a time
    assert fast == pytest.approx(means(model, *SETS), abs=1e-6)


@pytest.mark.parametrize("kind", ["nano_beir", "triplets", "distillation"])
def test_a_comparison_shows_it_before_and_after(kind, nano_beir):
    of = {
        "nano_beir": (triplets(), {"evaluation": {"rows": 0, "nano_beir": list(SETS)}}, NANO_BEIR_METRICS),
        "triplets": (triplets(), {}, ("ndcg@10", "accuracy")),
        "distillation": (taught(), {"loss": {"name": "distillation"}}, ("ndcg@10", "kl_divergence")),
    }
    rows, sections, names = of[kind]
    recipe = recipe_of(nano_beir, rows, **sections, model={"embedding_size": 8})
    prepared, steps = prepare(recipe), nano_beir / "steps.jsonl"
    run = summarize(measure(prepared, steps, untrained=True), read_steps(steps))
    assert set(names) < run.keys() and run["untrained"].keys() == set(names)
    assert run["untrained_seconds"] > 0
    runs = {"stock": run, "fast": run}
    comparison = {"recipe": {"name": "x"}, "runs": runs, "summary": contrast(run, run) | WALL}
    console = Console(width=200, file=io.StringIO())
    console.print(comparison_table(comparison))
    write_html(comparison, nano_beir / "compare.html")
    page = (nano_beir / "compare.html").read_text()
    for name in names:
        for shown in (console.file.getvalue(), page):
            assert METRICS[name] in shown
            assert f"{run[name]:.4f}" in shown and f"{run['untrained'][name]:.4f}" in shown
    assert not any(METRICS[name] in page for name in METRICS.keys() - set(names))


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "evaluation.nano_beir=[nq, ms_marco]",
            "evaluation.nano_beir must name sets out of climatefever, dbpedia, fever, fiqa2018, hotpotqa, msmarco, "
            "nfcorpus, nq, quoraretrieval, scidocs, arguana, scifact, touche2020, got 'ms_marco'.",
        ),
        ("evaluation.nano_beir=[nq, NQ]", "evaluation.nano_beir must name each set once, got nq, NQ."),
        (
            "evaluation.nano_beir=[]",
            "evaluation.nano_beir must be a list of at least one string or null, got [].",
        ),
        (
            "evaluation={rows: 4, nano_beir: [nq]}",
            "evaluation must have at most one of rows, beir and nano_beir.",
        ),
        (
            "evaluation={beir: some/data, nano_beir: [nq]}",
            "evaluation must have at most one of rows, beir and nano_beir.",
        ),
    ],
)
def test_what_cannot_be_is_one_sentence(override, sentence, tmp_path):
    with pytest.raises(RecipeError) as error:
        load_recipe(write(tmp_path, tiny(tmp_path, evaluation={"rows": 0})), [override])
    assert str(error.value) == sentence


def test_sets_that_cannot_be_loaded_are_one_sentence_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    recipe = load_recipe(write(tmp_path, tiny(tmp_path, evaluation={"rows": 0})), ["evaluation.nano_beir=[nq]"])
    with pytest.raises(RecipeError, match="^evaluation.nano_beir cannot be loaded: .*zeta-alpha-ai/NanoNQ") as error:
        train(recipe)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()
