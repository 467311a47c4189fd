"""Evaluation of SPLADE models by exact sparse search: the metrics of the ranking, and how sparse the vectors are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

import numpy as np
import torch
from datasets import Dataset
from sentence_transformers import SparseEncoder
from sentence_transformers.sparse_encoder.evaluation import SparseNanoBEIREvaluator
from torch import Tensor

from pylate_fastmaxsim.recipes.config.schema import Recipe
from pylate_fastmaxsim.recipes.evaluation import held_out
from pylate_fastmaxsim.recipes.evaluation.beir import Collection
from pylate_fastmaxsim.recipes.evaluation.finite import only_finite
from pylate_fastmaxsim.recipes.evaluation.nano_beir import OPTIONS, mean_over_sets
from pylate_fastmaxsim.recipes.evaluation.ranking import DEPTH, METRICS, encode_corpus, metrics_of, ranking, shown
from pylate_fastmaxsim.recipes.evaluation.targets import RecipeData
from pylate_fastmaxsim.recipes.models.encode import encode, exact_search
from pylate_fastmaxsim.sparse import SparseBatch

SPARSITY = ("flops", "query_nonzeros", "document_nonzeros")


def evaluate(recipe: Recipe, model: SparseEncoder, data: RecipeData) -> dict[str, float]:
    """Metrics by name, of the one of the three that the recipe has, and :func:`sparsity` of the same texts."""
    batch_size = recipe.evaluation.batch_size
    with only_finite(model):
        if data.collection is not None:
            return evaluate_collection(model, data.collection, batch_size)
        if data.nano_beir is not None:
            return mean_over_sets(data.nano_beir, partial(evaluate_collection, model, batch_size=batch_size))
        return evaluate_held_out(recipe, model, data.held_out)


def names_of_metrics(recipe: Recipe, data: RecipeData) -> list[str]:
    """The names of what :func:`evaluate` returns."""
    names = METRICS if data.held_out is None else held_out.names_of_metrics(recipe, data.held_out)
    return [*names, *SPARSITY]


def nano_beir_evaluator(recipe: Recipe) -> SparseNanoBEIREvaluator:
    """The evaluator of Sentence Transformers, of which only the queries, documents and judgements are used."""
    return SparseNanoBEIREvaluator(recipe.evaluation.nano_beir, **OPTIONS)


def evaluate_collection(model: SparseEncoder, collection: Collection, batch_size: int) -> dict[str, float]:
    """nDCG@10, MRR@10 and Recall@100 of exact search, and the sparsity of the judged queries and all documents."""
    queries = encode(model, list(collection.queries.values()), batch_size, is_query=True, show_progress=True)
    counted = TermCounts(queries.vocabulary)
    documents = shown(encode_corpus(model, collection.corpus, batch_size), len(collection.corpus), "Searching")
    found = ranking(collection, *exact_search(queries, counted.passing(documents), DEPTH + 1), DEPTH)
    return metrics_of(found, collection) | sparsity(TermCounts(queries.vocabulary).add(queries), counted)


def evaluate_held_out(recipe: Recipe, model: SparseEncoder, rows: Dataset) -> dict[str, float]:
    """nDCG@10 over the documents of all rows, and ``kl_divergence`` or ``accuracy`` as for other text encoders.

    The KL divergence is that of softmaxes of the scores as they are, without a temperature.
    """
    task = held_out.task_of(recipe, rows)
    collection = held_out.collection_of_task(task)
    batch_size = recipe.evaluation.batch_size
    queries = encode(model, list(task.queries), batch_size, is_query=True, show_progress=True)
    documents = SparseBatch.concatenate(
        shown(encode_corpus(model, collection.corpus, batch_size), len(task.documents), "Encoding documents")
    )
    found = ranking(collection, *exact_search(queries, [documents], DEPTH), DEPTH)
    metrics = metrics_of(found, collection, ["ndcg@10"])
    if len(held_out.names_of_metrics(recipe, rows)) > 1:
        scores = _scores_of_rows(recipe, rows, queries, documents, task)
        metrics |= held_out.metrics_of_rows(recipe, rows, scores)
    counts = [TermCounts(batch.vocabulary).add(batch) for batch in (queries, documents)]
    return metrics | sparsity(*counts)


def _scores_of_rows(
    recipe: Recipe, rows: Dataset, queries: SparseBatch, documents: SparseBatch, task: held_out.HeldOutTask
) -> Tensor:
    """Scores ``[N, n]`` (float64) of the query of each row and its own documents."""
    own_queries, candidates = held_out.places_of_rows(recipe, rows, task)
    own_queries = own_queries.repeat_interleave(candidates.shape[1])
    left, right = (
        batch.to_scipy().astype(np.float64)[own.numpy()]
        for batch, own in ((queries, own_queries), (documents, candidates.flatten()))
    )
    return torch.from_numpy(np.asarray((left * right).sum(axis=1))).reshape(candidates.shape)


class TermCounts:
    """In how many of the vectors that were added each term of a vocabulary is not zero."""

    def __init__(self, vocabulary: int) -> None:
        self.texts = 0
        self.counts = torch.zeros(vocabulary, dtype=torch.int64)

    def add(self, batch: SparseBatch) -> TermCounts:
        """Count the vectors of a batch as well."""
        self.texts += len(batch)
        self.counts += torch.bincount(batch.terms.to(torch.int64), minlength=len(self.counts)).cpu()
        return self

    def passing(self, batches: Iterable[SparseBatch]) -> Iterator[SparseBatch]:
        """The same batches, each counted as it goes by."""
        for batch in batches:
            self.add(batch)
            yield batch


def sparsity(queries: TermCounts, documents: TermCounts) -> dict[str, float]:
    """FLOPS and the mean numbers of non-zeros of a query and of a document.

    FLOPS is the mean number of products in the score of a query and a document: the sum over the vocabulary of how often
    a term is in a query times how often it is in a document (https://arxiv.org/abs/2107.05720).

    Examples
    --------
    >>> from pylate_fastmaxsim import SparseBatch
    >>> from pylate_fastmaxsim.recipes.evaluation.sparse import TermCounts, sparsity
    >>> queries = SparseBatch.from_lists([[(0, 1.0), (2, 0.5)], [(2, 1.0)]], 4)
    >>> documents = SparseBatch.from_lists([[(1, 1.0), (2, 2.0), (3, 1.0)]], 4)
    >>> sparsity(TermCounts(4).add(queries), TermCounts(4).add(documents))
    {'flops': 1.0, 'query_nonzeros': 1.5, 'document_nonzeros': 3.0}
    """
    shares = [each.counts.double() / max(1, each.texts) for each in (queries, documents)]
    return dict(zip(SPARSITY, map(float, (shares[0] @ shares[1], *(share.sum() for share in shares))), strict=True))
