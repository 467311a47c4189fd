"""Evaluation with the pooling of a recipe: scores of texts without their padding, with the plugin on and off."""

from contextlib import nullcontext

import models
import pytest
import torch
from datasets import Dataset
from pooled_definitions import defined_scores
from pylate.evaluation import colbert_distillation, colbert_triplet
from tiny_recipe import text, tiny, write
from torch.nn.utils.rnn import pad_sequence

import pylate_fastmaxsim
from pylate_fastmaxsim import LogSumExp, Max, Softmax, TokenBatch, TopK
from pylate_fastmaxsim.recipes.evaluation.beir import Collection
from pylate_fastmaxsim.recipes.evaluation.pooling import pooled_pairs, score_functions
from pylate_fastmaxsim.recipes.evaluation.ranking import retrieve
from pylate_fastmaxsim.recipes.evaluation.targets import RecipeData
from pylate_fastmaxsim.recipes.evaluation.text import evaluate
from pylate_fastmaxsim.recipes.load import load_recipe

STATES = {"off": nullcontext, "on": pylate_fastmaxsim.enabled}


@pytest.fixture(params=STATES)
def state(request):
    """The plugin off and on."""
    with STATES[request.param]():
        yield request.param


@pytest.mark.parametrize("pooling", [TopK(3), Softmax(0.5), LogSumExp(0.5)])
def test_padding_of_the_evaluators_does_not_count(pooling, state):
    torch.manual_seed(0)
    queries = [torch.randn(length, 8) for length in (3, 5, 4)]
    documents = [torch.randn(length, 8) for length in (2, 9, 1, 6, 7, 3)]
    expected = defined_scores(*map(TokenBatch.from_list, (queries, documents)), pooling=pooling).float()
    padded_queries, padded = (pad_sequence(each, batch_first=True) for each in (queries, documents))
    ((name, score),) = score_functions(pooling).items()
    assert name == type(pooling).__name__
    torch.testing.assert_close(score(padded_queries, padded), expected)
    before = colbert_triplet.colbert_scores_pairwise, colbert_distillation.colbert_kd_scores
    with pooled_pairs(pooling):
        pairs = colbert_triplet.colbert_scores_pairwise(queries_embeddings=queries, documents_embeddings=documents[:3])
        own = colbert_distillation.colbert_kd_scores(padded_queries, padded.view(3, 2, 9, 8))
    torch.testing.assert_close(pairs, expected[:, :3].diagonal())
    torch.testing.assert_close(own, expected.view(3, 3, 2)[range(3), range(3)])
    assert (colbert_triplet.colbert_scores_pairwise, colbert_distillation.colbert_kd_scores) == before
    assert score_functions(Max()) is None


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
    found = retrieve(model, Collection(corpus, queries, {name: {} for name in queries}), 8, Softmax(0.2))
    embedded = (
        model.encode(texts, is_query=query) for texts, query in ((list(queries.values()), True), (documents, False))
    )
    batches = (TokenBatch.from_list([torch.as_tensor(each) for each in some]) for some in embedded)
    scores = defined_scores(*batches, pooling=Softmax(0.2))
    for row, query in enumerate(queries):
        expected = {f"d{column}": score for column, score in enumerate(scores[row].tolist())}
        assert found[query] == pytest.approx(expected, rel=1e-5)
