"""Evaluation with the pooling of a recipe: scores of texts without their padding, with the plugin on and off."""

from contextlib import nullcontext

import pytest
import torch
from datasets import Dataset

import pylate_fastmaxsim
from pylate_fastmaxsim import Softmax, TokenBatch, reference
from pylate_fastmaxsim.recipes.data.collection import Collection, RecipeData
from pylate_fastmaxsim.recipes.evaluation.evaluate import evaluate
from pylate_fastmaxsim.recipes.evaluation.ranking import retrieve
from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.models.retriever import retriever_of
from tests.support import models
from tests.support.tiny_recipe import text, tiny, write

STATES = {"off": nullcontext, "on": pylate_fastmaxsim.enabled}


@pytest.fixture(params=STATES)
def state(request):
    """The plugin off and on."""
    with STATES[request.param]():
        yield request.param


ROWS = {
    "contrastive": [
        {"query": text(i, 4), "positive": text(i, 4 + i % 17), "negative": text(i * 5 + 3, 3)} for i in range(12)
    ],
    "distillation": [
        {
            "query": text(i, 4),
            "documents": [text(i + j, 3 + (i * j) % 11) for j in range(3)],
            "scores": [i % 3, 3.0, 1.0],
        }
        for i in range(12)
    ],
}


@pytest.mark.parametrize("loss", ROWS)
def test_metrics_of_held_out_rows_are_those_of_the_pooling_with_and_without_the_plugin(loss, encoder, tmp_path):
    data = RecipeData(Dataset.from_list([]), held_out=Dataset.from_list(ROWS[loss]))
    file = write(tmp_path, tiny(tmp_path, loss={"name": loss}))
    model = models.load_model(encoder("modernbert"))
    found = {}
    for override in ("loss.pooling=max", "loss.pooling.log_sum_exp=0.5"):
        recipe = load_recipe(file, [override])
        off = evaluate(recipe, model, data)
        with pylate_fastmaxsim.enabled():
            on = evaluate(recipe, model, data)
        assert on == pytest.approx(off, rel=1e-5)
        found[override] = off
    maximum, pooled = found.values()
    assert maximum.keys() == pooled.keys() and maximum != pytest.approx(pooled, rel=1e-3)


def test_a_collection_is_searched_with_the_pooling(encoder, state):
    documents = [text(row, 1 + row % 23) for row in range(40)]
    corpus = Dataset.from_list([{"_id": f"d{row}", "text": document} for row, document in enumerate(documents)])
    queries = {f"q{row}": text(row * 3, 5) for row in range(3)}
    model = models.load_model(encoder("modernbert"))
    found, _ = retrieve(
        retriever_of(model), Collection(corpus, queries, {name: {} for name in queries}), 8, Softmax(0.2)
    )
    embedded = (
        model.encode(texts, is_query=query) for texts, query in ((list(queries.values()), True), (documents, False))
    )
    batches = (TokenBatch.from_list([torch.as_tensor(each) for each in some]) for some in embedded)
    scores = reference.pooled_scores(*batches, pooling=Softmax(0.2))
    for row, query in enumerate(queries):
        expected = {f"d{column}": score for column, score in enumerate(scores[row].tolist())}
        assert found[query] == pytest.approx(expected, rel=1e-5)
