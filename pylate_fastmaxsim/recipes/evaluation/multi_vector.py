"""Evaluation of MultiVectorEncoders by exact search."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from datasets import Dataset

from pylate_fastmaxsim.ops.pooled import Pooling, pooled_scores
from pylate_fastmaxsim.recipes.config.schema import Recipe
from pylate_fastmaxsim.recipes.evaluation import held_out
from pylate_fastmaxsim.recipes.evaluation.finite import only_finite
from pylate_fastmaxsim.recipes.evaluation.nano_beir import OPTIONS, mean_over_sets
from pylate_fastmaxsim.recipes.evaluation.ranking import DEPTH, METRICS, evaluate_collection, metrics_of, ranking
from pylate_fastmaxsim.recipes.evaluation.targets import RecipeData
from pylate_fastmaxsim.recipes.models.encode import encode, exact_search
from pylate_fastmaxsim.recipes.pooling import final_pooling

if TYPE_CHECKING:
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.multi_vector_encoder.evaluation import MultiVectorNanoBEIREvaluator


def evaluate(recipe: Recipe, model: MultiVectorEncoder, data: RecipeData) -> dict[str, float]:
    """Metrics by name, of the one of the three that the recipe has."""
    section, pooling = recipe.evaluation, final_pooling(recipe.loss.pooling)
    with only_finite(model), torch.inference_mode():
        if data.collection is not None:
            return evaluate_collection(model, data.collection, section.batch_size, pooling, section.corpus_format)
        if data.nano_beir is not None:
            return mean_over_sets(
                data.nano_beir, partial(evaluate_collection, model, batch_size=section.batch_size, pooling=pooling)
            )
        return evaluate_held_out(recipe, model, data.held_out, pooling)


def names_of_metrics(recipe: Recipe, data: RecipeData) -> list[str]:
    """The names of what :func:`evaluate` returns."""
    return list(METRICS) if data.held_out is None else held_out.names_of_metrics(recipe, data.held_out)


def nano_beir_evaluator(recipe: Recipe) -> MultiVectorNanoBEIREvaluator:
    """The evaluator of Sentence Transformers, of which only the queries, documents and judgements are used."""
    from sentence_transformers.multi_vector_encoder.evaluation import MultiVectorNanoBEIREvaluator

    return MultiVectorNanoBEIREvaluator(recipe.evaluation.nano_beir, **OPTIONS)


def evaluate_held_out(recipe: Recipe, model: MultiVectorEncoder, rows: Dataset, pooling: Pooling) -> dict[str, float]:
    """nDCG@10 over the documents of all rows, and ``kl_divergence`` or ``accuracy`` as for other text encoders.

    The KL divergence is that of the loss: of scores divided by its temperature, times the square of that.
    """
    task = held_out.task_of(recipe, rows)
    batch_size = recipe.evaluation.batch_size
    queries = encode(model, list(task.queries), batch_size, is_query=True, show_progress=True)
    documents = encode(model, list(task.documents), batch_size, is_query=False, show_progress=True)
    collection = held_out.collection_of_task(task)
    found = ranking(collection, *exact_search(queries, [documents], DEPTH, pooling), DEPTH)
    metrics = metrics_of(found, collection, ["ndcg@10"])
    if len(held_out.names_of_metrics(recipe, rows)) == 1:
        return metrics
    own_queries, candidates = (places.to(queries.device) for places in held_out.places_of_rows(recipe, rows, task))
    scores = pooled_scores(queries.select(own_queries), documents, candidates, pooling=pooling).double().cpu()
    return metrics | held_out.metrics_of_rows(recipe, rows, scores, recipe.loss.temperature or 1.0)
