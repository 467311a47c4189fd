"""Evaluate a model on what its recipe names, by exact search."""

from __future__ import annotations

import logging

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor

from pylate_fastmaxsim.ops.pooled import pooled_scores
from pylate_fastmaxsim.pooling import Pooling
from pylate_fastmaxsim.recipes.config.schema import Recipe
from pylate_fastmaxsim.recipes.data.collection import RecipeData
from pylate_fastmaxsim.recipes.evaluation import held_out
from pylate_fastmaxsim.recipes.evaluation.ranking import (
    DEPTH,
    METRICS,
    SPARSITY,
    Sparsity,
    encode_corpus,
    evaluate_collection,
    metrics_of,
    ranking,
    with_progress_bar,
)
from pylate_fastmaxsim.recipes.models.load import HostModel
from pylate_fastmaxsim.recipes.models.retriever import Encoded, NotFiniteError, Retriever, retriever_of
from pylate_fastmaxsim.recipes.pooling import final_pooling
from pylate_fastmaxsim.sparse import SparseBatch
from pylate_fastmaxsim.tokens import TokenBatch

logger = logging.getLogger(__name__)


def evaluate(recipe: Recipe, model: HostModel, data: RecipeData) -> dict[str, float | None]:
    """The metrics of the recipe's evaluation by name; nDCG@10 is None where it has none.

    Of a sparse model also :func:`~pylate_fastmaxsim.recipes.evaluation.ranking.Sparsity` of the same texts. All are None
    where the model's embeddings are not finite: an order of such scores is arbitrary, and the metrics of it look like
    any others.
    """
    if not data.is_evaluated:
        return {"ndcg@10": None}
    retriever = retriever_of(model, finite=True)
    pooling, batch_size = final_pooling(recipe.loss.pooling), recipe.evaluation.batch_size
    try:
        with torch.inference_mode():
            if data.collections:
                options = (batch_size, pooling, recipe.evaluation.corpus_format)
                found = [evaluate_collection(retriever, each, *options) for each in data.collections]
                return {name: sum(metrics[name] for metrics in found) / len(found) for name in found[0]}
            return evaluate_held_out(recipe, retriever, data.held_out)
    except NotFiniteError:
        logger.warning(
            "The evaluation has no metrics: embeddings of the model are NaN or infinite, as after a training that diverged."
        )
        return dict.fromkeys(metric_names(recipe, data))


def metric_names(recipe: Recipe, data: RecipeData) -> list[str]:
    """The names of what :func:`evaluate` returns."""
    names = list(METRICS) if data.held_out is None else held_out.metric_names(recipe, data.held_out)
    return [*names, *SPARSITY] if recipe.model.kind == "splade" else names


def evaluate_held_out(recipe: Recipe, model: Retriever, rows: Dataset) -> dict[str, float]:
    """nDCG@10 over the documents of all rows, and of texts ``kl_divergence`` or ``accuracy``."""
    batch_size, pooling = recipe.evaluation.batch_size, final_pooling(recipe.loss.pooling)
    collection = held_out.collection_of(recipe, rows)
    queries = model.encode(list(collection.queries.values()), batch_size, is_query=True, show_progress=True)
    encoded = with_progress_bar(
        encode_corpus(model, collection.corpus, batch_size), len(collection.corpus), "Encoding documents"
    )
    documents, sparsity = list(encoded), Sparsity()
    found = ranking(collection, *model.search(queries, sparsity.counted(queries, documents), DEPTH, pooling), DEPTH)
    metrics = metrics_of(found, collection, ["ndcg@10"])
    if len(held_out.metric_names(recipe, rows)) > 1:
        places = held_out.positions_of_rows(recipe, rows, collection)
        metrics |= held_out.metrics_of_rows(recipe, rows, _scores_of_rows(queries, documents, *places, pooling))
    return metrics | sparsity.metrics()


def _scores_of_rows(
    queries: Encoded, documents: list[Encoded], own_queries: Tensor, candidates: Tensor, pooling: Pooling
) -> Tensor:
    """Scores ``[N, n]`` (float64) of the query of each row and its own documents."""
    if not isinstance(queries, SparseBatch):
        # Each document is encoded back to back with the others of its batch.
        values, lengths = (torch.cat([getattr(batch, name) for batch in documents]) for name in ("values", "lengths"))
        whole = TokenBatch.from_packed(values, torch.nn.functional.pad(lengths.cumsum(0), (1, 0)))
        own_queries, candidates = own_queries.to(queries.device), candidates.to(queries.device)
        return pooled_scores(queries.select(own_queries), whole, candidates, pooling=pooling).double().cpu()
    own_queries = own_queries.repeat_interleave(candidates.shape[1])
    left, right = (
        batch.to_scipy().astype(np.float64)[own.numpy()]
        for batch, own in ((queries, own_queries), (SparseBatch.concatenate(documents), candidates.flatten()))
    )
    return torch.from_numpy(np.asarray((left * right).sum(axis=1))).reshape(candidates.shape)
