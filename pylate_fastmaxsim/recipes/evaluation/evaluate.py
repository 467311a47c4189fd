"""Evaluate a model on what its recipe names, by exact search."""

import logging
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from datasets import Dataset, Features, Value
from datasets import Image as ImageFeature
from sentence_transformers.evaluation import InformationRetrievalEvaluator
from torch import Tensor

from pylate_fastmaxsim.ops.pooled import pooled_scores
from pylate_fastmaxsim.pooling import Pooling
from pylate_fastmaxsim.recipes.config.schema import Recipe
from pylate_fastmaxsim.recipes.data.collection import PAGES, Collection, RecipeData
from pylate_fastmaxsim.recipes.data.tables import loading
from pylate_fastmaxsim.recipes.evaluation.ranking import (
    DEPTH,
    METRICS,
    SPARSITY,
    Sparsity,
    encode_corpus,
    evaluate_collection,
    metrics_of,
    ranking,
)
from pylate_fastmaxsim.recipes.kind import Kind
from pylate_fastmaxsim.recipes.models.load import HostModel, kind_of
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
    retriever = retriever_of(model, finite=True, pool_factor=recipe.evaluation.pool_factor)
    pooling, batch_size = final_pooling(recipe.loss.pooling), recipe.evaluation.batch_size
    try:
        with torch.no_grad():  # not inference mode, whose tensors a training that goes on could not use
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
    names = [*METRICS]
    if data.held_out is not None:
        names = ["ndcg@10", *filter(None, [metric_of_rows(recipe, data.held_out)])]
    return [*names, *SPARSITY] if recipe.model.kind == "splade" else names


def metric_of_rows(recipe: Recipe, rows: Dataset) -> str | None:
    """The metric of each row by itself, of texts: ``kl_divergence`` with teacher scores, ``accuracy`` with negatives."""
    if recipe.model.visual or len(rows.column_names) == 2:
        return None
    return "kl_divergence" if recipe.loss.name == "distillation" else "accuracy"


def evaluate_held_out(recipe: Recipe, model: Retriever, rows: Dataset) -> dict[str, float]:
    """nDCG@10 over the documents of all rows, and of texts ``kl_divergence`` or ``accuracy``."""
    batch_size, pooling = recipe.evaluation.batch_size, final_pooling(recipe.loss.pooling)
    collection = collection_of(recipe, rows)
    queries = model.encode(list(collection.queries.values()), batch_size, is_query=True, show_progress=True)
    documents = list(encode_corpus(model, collection.corpus, batch_size, "Encoding documents"))
    sparsity = Sparsity(queries)
    found = ranking(collection, *model.search(queries, sparsity.counted(documents), DEPTH, pooling), DEPTH)
    metrics = metrics_of(found, collection, ["ndcg@10"])
    if (name := metric_of_rows(recipe, rows)) is not None:
        scores = _scores_of_rows(queries, documents, *positions_of_rows(recipe, rows, collection), pooling)
        if name == "accuracy":
            value = (scores[:, 0] > scores[:, 1]).double().mean()
        else:
            teacher = torch.tensor(rows[:][rows.column_names[-1]], dtype=torch.float64)
            value = kind_of(recipe.model).divergence(recipe.loss, scores, teacher)
        metrics[name] = float(value)
    return metrics | sparsity.metrics()


def _scores_of_rows(
    queries: Encoded, documents: list[Encoded], own_queries: Tensor, candidates: Tensor, pooling: Pooling
) -> Tensor:
    """Scores ``[N, n]`` (float64) of the query of each row and its own documents, by their positions."""
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


def collection_of(recipe: Recipe, held_out: Dataset) -> Collection:
    """The held-out queries, over all held-out documents.

    The relevant document of a query is its first one, or for distillation the teacher's best. Equal texts are one query
    or one document, so that a query that stands in several rows has the relevant documents of all of them.
    """
    if recipe.model.visual:
        return collection_of_pages(held_out)
    queries: dict[str, str] = {}
    documents: dict[str, str] = {}
    judgements: dict[str, dict[str, int]] = {}
    for number, row in enumerate(held_out):
        text, own = texts_of(recipe, row)
        best = 0
        if recipe.loss.name == "distillation":
            scores = list(row.values())[-1]
            best = scores.index(max(scores))
        query = queries.setdefault(text, f"q{number}")
        ids = [documents.setdefault(document, f"d{number}-{place}") for place, document in enumerate(own)]
        judgements.setdefault(query, {})[ids[best]] = 1
    corpus = Dataset.from_dict({"_id": list(documents.values()), "text": list(documents)})
    return Collection(corpus, {query: text for text, query in queries.items()}, judgements)


def collection_of_pages(held_out: Dataset) -> Collection:
    """The held-out queries over all held-out pages, which are the column ``image`` of the corpus.

    Equal images are one page, and equal texts are one query, for which the pages of all its rows are relevant.
    """
    query_column, page_column, *_ = held_out.column_names
    texts: dict[str, str] = {}
    pages: dict[str, dict[str, Any]] = {}
    relevant: dict[str, dict[str, int]] = {}
    # As they are stored, because an image that is encoded again may lose.
    stored = held_out.select_columns(page_column).with_format("arrow").iter(1)
    for number, (row, files) in enumerate(zip(held_out, stored, strict=True)):
        own, files = (each if isinstance(each, list) else [each] for each in (row[page_column], files[0][0].as_py()))
        names = [sha256(repr((page.mode, page.size)).encode() + page.tobytes()).hexdigest() for page in own]
        pages |= dict(zip(names, files, strict=True))
        query = texts.setdefault(row[query_column], f"q{number}")
        relevant.setdefault(query, {}).update(dict.fromkeys(names, 1))
    corpus = {"_id": list(pages), PAGES: list(pages.values())}
    features = Features({"_id": Value("string"), PAGES: ImageFeature()})
    queries = {query: text for text, query in texts.items()}
    return Collection(Dataset.from_dict(corpus, features=features), queries, relevant)


def texts_of(recipe: Recipe, row: dict[str, Any]) -> tuple[str, list[str]]:
    """The query of a row and its documents."""
    query, *columns = row.values()
    return query, columns[0] if recipe.loss.name == "distillation" else columns


def positions_of_rows(recipe: Recipe, rows: Dataset, collection: Collection) -> tuple[Tensor, Tensor]:
    """The positions of the query ``[N]`` and the documents ``[N, n]`` of each row among those of :func:`collection_of`."""
    queries, documents = (
        {text: place for place, text in enumerate(texts)}
        for texts in (collection.queries.values(), collection.corpus["text"])
    )
    found = [texts_of(recipe, row) for row in rows]
    return (
        torch.tensor([queries[query] for query, _ in found]),
        torch.tensor([[documents[text] for text in texts] for _, texts in found]),
    )


def load_nano_beir(recipe: Recipe, kind: Kind) -> list[Collection]:
    """The collections of ``evaluation.nano_beir``, loaded by the evaluator that the library of the model has for them."""
    with loading("evaluation.nano_beir"):
        evaluator = kind.nano_beir_evaluator(
            recipe.evaluation.nano_beir, precision_recall_at_k=[100], show_progress_bar=True, write_csv=False
        )
    return list(map(collection_of_set, evaluator.evaluators))


def collection_of_set(evaluator: InformationRetrievalEvaluator) -> Collection:
    """The queries, documents and judgements of an evaluator."""
    return Collection(
        Dataset.from_dict({"_id": evaluator.corpus_ids, "text": evaluator.corpus}),
        dict(zip(evaluator.queries_ids, evaluator.queries, strict=True)),
        {query: dict.fromkeys(sorted(evaluator.relevant_docs[query]), 1) for query in evaluator.queries_ids},
    )
