"""Evaluation of models of pages: nDCG@10 of the rows that were held out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Any

from datasets import Dataset, Features, Value
from datasets import Image as ImageFeature
from PIL import Image
from torch import Tensor
from tqdm.auto import tqdm

from pylate_fastmaxsim.recipes.config.schema import Recipe
from pylate_fastmaxsim.recipes.evaluation.beir import PAGES, Collection
from pylate_fastmaxsim.recipes.evaluation.finite import require_finite
from pylate_fastmaxsim.recipes.evaluation.ranking import metrics_of
from pylate_fastmaxsim.recipes.evaluation.targets import RecipeData
from pylate_fastmaxsim.recipes.models.retriever import VisualRetriever

METRIC = "ndcg@10"
DEPTH = 10


def evaluate(recipe: Recipe, retriever: VisualRetriever, data: RecipeData) -> dict[str, float]:
    """nDCG@10 of the rows that were held out."""
    return evaluate_pages(retriever, data.held_out, recipe.evaluation.batch_size)


def names_of_metrics(recipe: Recipe, data: RecipeData) -> list[str]:
    """The names of what :func:`evaluate` returns."""
    return [METRIC]


def evaluate_pages(retriever: VisualRetriever, held_out: Dataset, batch_size: int) -> dict[str, float]:
    """nDCG@10 of the held-out queries over all held-out pages, scored by the processor of the model."""
    collection = collection_of_pages(held_out)
    queries = _encode(retriever, list(collection.queries.values()), True, batch_size, "Encoding queries")
    documents = _encode(retriever, collection.corpus[PAGES], False, batch_size, "Encoding pages")
    scores = retriever.processor.score(queries, documents, device=retriever.model.device)
    names, relevant = collection.corpus["_id"][:], collection.judgements
    best = scores.topk(min(DEPTH, len(names)), dim=1)
    run = {
        query: {names[place]: score for place, score in zip(places, values, strict=True)}
        for query, places, values in zip(relevant, best.indices.tolist(), best.values.tolist(), strict=True)
    }
    return metrics_of(run, collection, [METRIC])


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
        names = [_name(page) for page in own]
        pages |= dict(zip(names, files, strict=True))
        query = texts.setdefault(row[query_column], f"q{number}")
        relevant.setdefault(query, {}).update(dict.fromkeys(names, 1))
    corpus = {"_id": list(pages), PAGES: list(pages.values())}
    features = Features({"_id": Value("string"), PAGES: ImageFeature()})
    queries = {query: text for text, query in texts.items()}
    return Collection(Dataset.from_dict(corpus, features=features), queries, relevant)


def _name(page: Image.Image) -> str:
    return sha256(repr((page.mode, page.size)).encode() + page.tobytes()).hexdigest()


def _encode(
    retriever: VisualRetriever, items: Sequence[Any], is_query: bool, batch_size: int, description: str
) -> list[Tensor]:
    embeddings: list[Tensor] = []
    for batch in _batches(items, batch_size, description):
        embeddings += [row.cpu() for row in retriever.encode(batch, batch_size, is_query)]
    require_finite(embeddings)
    return embeddings


def _batches(items: Sequence[Any], batch_size: int, description: str) -> Iterator[list[Any]]:
    with tqdm(total=len(items), desc=description) as progress:
        for begin in range(0, len(items), batch_size):
            batch = list(items[begin : begin + batch_size])
            yield batch
            progress.update(len(batch))
