"""Recipes for images of pages: what they refuse, and how pages are ranked; see test_kinds.py for their training."""

import json
import sys

import pytest

pytest.importorskip("colpali_engine", reason='needs colpali-engine: pip install -e ".[test]"')

import torch
from datasets import Dataset, Features, Image, Value

from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.evaluation.evaluate import collection_of_pages, evaluate_held_out
from pylate_fastmaxsim.recipes.load import dump_recipe
from pylate_fastmaxsim.recipes.models.load import load_model
from pylate_fastmaxsim.recipes.models.retriever import retriever_of
from pylate_fastmaxsim.recipes.training.inputs import load_data
from pylate_fastmaxsim.recipes.training.train import train
from tests.support.case_tables import case_table
from tests.support.command_line import fastmaxsim
from tests.support.page_recipes import PAGES
from tests.support.tiny_recipe import text
from tests.support.visual_models import page

FEATURES = Features({"query": Value("string"), "image": Image()})


@case_table(r"""
overrides | sentence
model.lora.target_modules=nothing | model.name_or_path .* cannot be loaded: .*nothing.* not found
data.columns=[query, source] | 'source' must hold images, but it holds Value
data.columns=[image, query] | 'image' must hold text
data.columns=[query, image, negatives] | data.columns must be \[query, image\] for the loss colbert
loss.name=colbert_negative_ce data.columns=[query, image, uneven]
  | 'uneven' must hold the same number of images, but rows hold 1 to 2
loss.name=colbert_negative_ce | data.columns must be \[query, image, negatives\] for the loss colbert_neg
""")
def test_misuse_is_one_sentence(overrides, sentence, recipe_of, tmp_path):
    with pytest.raises(RecipeError, match=sentence) as error:
        train(recipe_of("colqwen2", overrides))
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


def test_a_missing_colpali_engine_is_named_with_what_installs_it(recipe_of, monkeypatch):
    loaded = recipe_of("colqwen2")
    monkeypatch.setitem(sys.modules, "colpali_engine", None)
    monkeypatch.delitem(sys.modules, "pylate_fastmaxsim.recipes.kinds.pages", raising=False)
    with pytest.raises(RecipeError, match='model.kind colqwen2 needs .*: pip install ".*colpali'):
        train(loaded)


@pytest.mark.e2e  # ranx compiles for seconds
def test_equal_pages_and_equal_queries_count_as_one(recipe_of):
    retriever = retriever_of(load_model((loaded := recipe_of("colqwen2")).model, "cpu", 0))
    for queries, pages in (([1, 2, 3], [1, 1, 1]), ([1, 1, 1], [1, 2, 3])):
        rows = {"query": [text(n, 2 + n) for n in queries], "image": list(map(page, pages))}
        assert evaluate_held_out(loaded, retriever, Dataset.from_dict(rows, features=FEATURES)) == {"ndcg@10": 1.0}


@pytest.mark.e2e
def test_evaluate_ranks_pages_as_the_evaluation_of_a_training_does(recipe_of, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    files, expected = [], []
    for kind in PAGES:
        loaded = recipe_of(kind, output=kind)
        retriever = load_model(loaded.model, "cpu", 0)
        retriever.save_pretrained(f"{loaded.output_dir}/model")
        files.append(tmp_path / f"{kind}.yaml")
        files[-1].write_text(dump_recipe(loaded))
        collection = collection_of_pages(load_data(loaded).held_out)
        queries = retriever.encode(list(collection.queries.values()), 4, is_query=True)
        scores = retriever.processor.score(queries, retriever.encode(collection.corpus["image"], 4, is_query=False))
        # The page of a query is the one of its row. All pages are equal for one of the queries.
        ranks = (scores > scores.diag()[:, None]).sum(1) + (scores == scores.diag()[:, None]).tril(-1).sum(1)
        expected.append(float((1 / (ranks + 2).log2()).mean()))
    result = tmp_path / "result.json"
    arguments = ["evaluate", *files, "--index", tmp_path / "index", "--json", result, "--batch-size", 4]
    for encoded in (6, 0):
        done = fastmaxsim(list(map(str, arguments)), code=0)
        written = json.loads(result.read_text())
        assert [model["encoded_documents"] for model in written["models"]] == [encoded, encoded]
        assert [model["metrics"]["ndcg@10"] for model in written["models"]] == pytest.approx(expected)
    for more in (["--beir", tmp_path], [tmp_path / "text"]):
        (tmp_path / "text").mkdir(exist_ok=True)
        (tmp_path / "text" / "config_sentence_transformers.json").write_text('{"model_type": "ColBERT"}')
        done = fastmaxsim(list(map(str, ["evaluate", *files, *more])))
        assert "colqwen_vidore retrieves pages; evaluate it without --beir" in done.stderr


def test_pages_are_kept_as_they_are_stored(tmp_path):
    page(1).save(tmp_path / "page.jpg", quality=30)  # which would lose more if it were encoded again
    image = {"bytes": (tmp_path / "page.jpg").read_bytes(), "path": None}
    rows = {"query": ["a", "b"], "image": [image, image]}
    held_out = Dataset.from_dict(rows, features=FEATURES)
    collection = collection_of_pages(held_out)
    (kept,) = collection.corpus["image"]
    assert kept.tobytes() == held_out[0]["image"].tobytes() and collection.queries == {"q0": "a", "q1": "b"}
