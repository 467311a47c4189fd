import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import sentence_transformers
import torch
from datasets import Dataset
from torch import Tensor

import pylate_fastmaxsim
from pylate_fastmaxsim import Softmax
from pylate_fastmaxsim.cli.tables import training_table
from pylate_fastmaxsim.recipes.data.collection import RecipeData, load_collection
from pylate_fastmaxsim.recipes.evaluation import ranking
from pylate_fastmaxsim.recipes.evaluation.evaluate import collection_of, collection_of_set, evaluate
from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.models.load import kind_of, load_trained
from pylate_fastmaxsim.recipes.training.inputs import load_data, prepare
from pylate_fastmaxsim.recipes.training.train import train
from pylate_fastmaxsim.recipes.validate import NANO_BEIR_SETS
from tests.support.beir_folder import write_folder
from tests.support.recipe_kinds import KINDS, LATE, tiny_of
from tests.support.saved_models import host_scores
from tests.support.tiny_recipe import text, write

PAIRS = [{"query": text(i, 4), "positive": f"{text(i, 4 + i % 17)} number {i}"} for i in range(40)]
# Were the second the negative, which is as good as a positive can be, no triplet would be right.
TRIPLETS = [{**row, "negative": text(i * 5 + 3, 3 + i % 9), "negative_2": text(i, 4)} for i, row in enumerate(PAIRS)]
DOCUMENTS = [[f"{text(i + j, 3 + (i * j) % 11)} {i}" for j in range(3)] for i in range(40)]
# Of integers, which neither PyLate's loss nor its evaluator takes as they are.
TAUGHT = [{"query": text(i, 4), "documents": each, "scores": [i % 3, 3, 1]} for i, each in enumerate(DOCUMENTS)]


def recipe_of(folder: Path, kind: str, rows: list[dict], *overrides: str):
    loss = "distillation" if "scores" in rows[0] else "contrastive"
    values = tiny_of(kind, folder, rows=rows, loss={"name": loss}, evaluation={"rows": 12}, training={"max_steps": 4})
    return load_recipe(write(folder, values), ["fast.enabled=true", *overrides])


def built(recipe):
    recipe = prepare(recipe)
    return recipe, load_data(recipe), load_trained(recipe.model, Path(recipe.model.name_or_path), "cpu")


def evaluators(kind: str) -> tuple[type, ...]:
    """The host's evaluators of triplets, of retrieval and of a distillation, if it has one."""
    if kind == "splade":
        host = sentence_transformers.sparse_encoder.evaluation
        return host.SparseTripletEvaluator, host.SparseInformationRetrievalEvaluator
    if kind == "multi_vector":
        from sentence_transformers.multi_vector_encoder import evaluation

        prefixes = ("MultiVectorTriplet", "MultiVectorInformationRetrieval", "MultiVectorDistillation")
    else:
        from pylate import evaluation

        prefixes = ("ColBERTTriplet", "PyLateInformationRetrieval", "ColBERTDistillation")
    return tuple(getattr(evaluation, f"{prefix}Evaluator") for prefix in prefixes)


@pytest.mark.parametrize(
    ("kind", "pooling"), [*((kind, None) for kind in KINDS), *[("colbert", Softmax(0.1))] * (LATE == "colbert")]
)
def test_triplets_have_the_metrics_of_the_host(kind, pooling, tmp_path):
    rows = [dict(row) for row in TRIPLETS]
    if kind == "multi_vector":  # whose evaluator has another order of documents that are the same tokens
        rows = [{name: f"{i} {each}" for name, each in row.items()} for i, row in enumerate(rows)]
    for row in rows[::3]:  # which the model gets wrong
        row["positive"], row["negative"] = row["negative"], row["positive"]
    recipe = recipe_of(tmp_path, kind, rows, *(["loss.pooling={softmax: 0.1}"] if pooling else []))
    result, data = train(recipe), load_data(prepare(recipe))
    model, held_out = load_trained(recipe.model, Path(result["model"]), "cpu"), data.held_out
    collection, (of_triplets, of_retrieval, *_) = collection_of(recipe, held_out), evaluators(kind)
    texts = dict(zip(collection.corpus["_id"], collection.corpus["text"], strict=True))
    relevant = {query: {*grades} for query, grades in collection.judgements.items()}
    with pylate_fastmaxsim.enabled(pooling=pooling) if pooling else nullcontext():
        accuracy = of_triplets(held_out["query"], held_out["positive"], held_out["negative"], write_csv=False)(model)
        retrieval = of_retrieval(collection.queries, texts, relevant, write_csv=False)(model)
    (ndcg,) = (value for name, value in retrieval.items() if name.endswith("ndcg@10"))
    expected = {"ndcg@10": ndcg, "accuracy": next(iter(accuracy.values()))}
    assert 0 < expected["accuracy"] < 1 and 0 < ndcg < 1
    assert {name: result[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert dict(training_table(result).rows)["Triplet accuracy"].endswith(f" to {expected['accuracy']:.4f}")
    again = evaluate(recipe, model, data)
    assert {name: again[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    # A set of NanoBEIR has the same metrics as the same collection.
    part = SimpleNamespace(queries=[*collection.queries.values()], queries_ids=[*collection.queries])
    part.corpus, part.corpus_ids, part.relevant_docs = [*texts.values()], [*texts], relevant
    nano = evaluate(recipe, model, RecipeData(None, collections=[collection_of_set(part)] * 2))
    assert list(nano) == [*ranking.METRICS, *(ranking.SPARSITY if kind == "splade" else ())]
    shared = nano.keys() & again.keys()
    assert {name: nano[name] for name in shared} == pytest.approx({name: again[name] for name in shared}, rel=1e-6)


DIVERGENCES = [
    ("colbert", "loss.normalize_scores=null", {"normalize_scores": True}),  # as PyLate's loss does
    ("colbert", "loss.normalize_scores=false", {"normalize_scores": False}),
    ("multi_vector", "loss.temperature=0.5", {"temperature": 0.5}),
    ("splade", "loss.name=distillation", None),
]


@pytest.mark.parametrize(("kind", "override", "options"), [case for case in DIVERGENCES if case[0] in KINDS])
def test_teacher_scores_are_compared_as_by_the_host(kind, override, options, tmp_path, monkeypatch):
    recipe, data, model = built(recipe_of(tmp_path, kind, TAUGHT, override))
    found, rows = evaluate(recipe, model, data), data.held_out[:]
    if options is None:  # the host has no evaluator
        own = zip(rows["query"], rows["documents"], strict=True)
        scores = torch.cat([host_scores(model, [query], documents) for query, documents in own]).double()
        teacher = torch.tensor(rows["scores"]).double().log_softmax(1)
        expected = float((teacher.exp() * (teacher - scores.log_softmax(1))).sum(1).mean())
    else:
        if kind == "colbert":
            monkeypatch.setattr("pylate.evaluation.colbert_distillation.colbert_kd_scores", scores_without_padding)
        *_, evaluator = evaluators(kind)
        expected = evaluator(*rows.values(), write_csv=False, **options)(model)["kl_divergence"]
    assert found["kl_divergence"] == pytest.approx(expected, rel=1e-5)
    assert "accuracy" not in found and 0 <= found["ndcg@10"] <= 1


def scores_without_padding(queries_embeddings: Tensor, documents_embeddings: Tensor) -> Tensor:
    """PyLate's scores of a distillation; it lets the rows of zeros win that it pads documents with."""
    similarities = torch.einsum("ash,abth->abst", queries_embeddings, documents_embeddings)
    padding = (documents_embeddings == 0).all(-1)[:, :, None]
    return similarities.masked_fill(padding, -torch.inf).max(-1).values.sum(-1)


@pytest.mark.parametrize("kind", KINDS)
def test_sets_of_nano_beir_are_those_of_the_host(kind, tmp_path, monkeypatch):
    loaded, evaluator = [], kind_of(recipe_of(tmp_path, kind, PAIRS).model).nano_beir_evaluator
    names = {"queries_ids": ["q1", "q2"], "corpus_ids": [f"d{row}" for row in range(30)]}
    texts = {"queries": [text(3, 5), text(4, 5)], "corpus": [text(row, 1 + row % 23) for row in range(30)]}
    relevant = {"q1": {"d3", "d5"}, "q2": {"d4"}}

    def load(self, name, **options):  # which needs a network
        loaded.append((name, options["precision_recall_at_k"]))
        return SimpleNamespace(**names, **texts, relevant_docs=relevant)

    monkeypatch.setattr(evaluator, "_load_dataset", load)
    recipe = recipe_of(tmp_path, kind, PAIRS, "evaluation={nano_beir: [nq, SciFact]}")
    assert len(load_data(prepare(recipe)).train) == 40
    result = train(recipe)
    assert loaded[-2:] == [("nq", [100]), ("SciFact", [100])]
    assert {"nDCG@10", "MRR@10", "Recall@100"} <= dict(training_table(result).rows).keys()
    assert result["ndcg@10"] < 1 and result["recall@100"] == 1
    again = train(recipe_of(tmp_path, kind, PAIRS, "evaluation={nano_beir: [msmarco]}"))
    assert again["resumed_from"] == "checkpoint-4" and again["losses"] == result["losses"]
    from sentence_transformers.evaluation import NanoBEIREvaluator

    assert set(NANO_BEIR_SETS) == set(sys.modules[NanoBEIREvaluator.__module__].DATASET_NAME_TO_HUMAN_READABLE)


def test_a_query_has_the_relevant_documents_of_all_its_rows(tmp_path):
    columns = {"query": ["a", "b", "a"], "positive": ["first", "other", "second"]}
    rows = Dataset.from_dict(columns | {"negative": ["other", "second", "third"]})
    collection = collection_of(recipe_of(tmp_path, LATE, TRIPLETS), rows)
    # Without repeated texts they are numbered by row.
    assert collection.queries == {"q0": "a", "q1": "b"}
    ids = ["d0-0", "d0-1", "d1-1", "d2-1"]
    assert collection.corpus[:] == {"_id": ids, "text": ["first", "other", "second", "third"]}
    assert collection.judgements == {"q0": {"d0-0": 1, "d1-1": 1}, "q1": {"d0-1": 1}}
    columns = {"query": ["a", "a", "b"], "documents": [["first", "other"], ["other", "second"], ["second", "first"]]}
    rows = Dataset.from_dict(columns | {"scores": [[2.0, 1.0], [0.5, 0.7], [0.0, 1.0]]})
    collection = collection_of(recipe_of(tmp_path, LATE, TAUGHT), rows)
    assert (collection.queries, collection.corpus["text"][:]) == ({"q0": "a", "q2": "b"}, ["first", "other", "second"])
    assert collection.judgements == {"q0": {"d0-0": 1, "d1-1": 1}, "q2": {"d0-0": 1}}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "collections"), [(TRIPLETS, False), (TAUGHT, False), (PAIRS, True)])
def test_a_model_of_nan_has_no_metrics(kind, rows, collections, tmp_path, caplog):
    recipe, data, model = built(recipe_of(tmp_path, kind, rows))
    if collections:
        data = RecipeData(data.train, collections=[load_collection(str(write_folder(tmp_path / "data")))] * 2)
    sound = evaluate(recipe, model, data)
    with torch.no_grad():  # as after a training that diverged
        for weight in model.parameters():
            weight.fill_(torch.nan)
    assert None not in sound.values() and evaluate(recipe, model, data) == dict.fromkeys(sound)
    assert ("accuracy" in sound, "kl_divergence" in sound) == (rows is TRIPLETS, rows is TAUGHT)
    assert set(ranking.SPARSITY) <= sound.keys() or kind != "splade"
    assert "The evaluation has no metrics: embeddings of the model are NaN" in caplog.messages[-1]


def test_a_collection_is_ranked_alike_with_the_plugin_and_by_the_codec_that_is_asked_for(tmp_path, monkeypatch):
    collection = f"evaluation={{beir: {write_folder(tmp_path / 'data')}}}"
    recipe, data, model = built(recipe_of(tmp_path, LATE, PAIRS, collection))
    stock = evaluate(recipe, model, data)
    with pylate_fastmaxsim.enabled():
        # Documents that are the same tokens change places where vectors differ by rounding.
        assert evaluate(recipe, model, data) == pytest.approx(stock, abs=1e-6 if LATE == "colbert" else 0.05)
    assert evaluate(recipe_of(tmp_path, LATE, PAIRS, collection, "evaluation.pool_factor=9"), model, data) != stock
    trained, train_codec = [], ranking.train_codec
    monkeypatch.setattr(ranking, "train_codec", lambda *args: trained.append(args[:2]) or train_codec(*args))
    compressed = recipe_of(tmp_path, LATE, PAIRS, collection, "evaluation.corpus_format=residual-1")
    assert evaluate(compressed, model, data)["ndcg@10"] > 0
    assert trained == [("evaluation.corpus_format residual-1", "residual-1")]
