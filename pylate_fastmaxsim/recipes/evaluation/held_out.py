"""Held-out rows as a collection, and the metrics of each row by itself."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset, Features, Value
from datasets import Image as ImageFeature
from torch import Tensor

from pylate_fastmaxsim.recipes.config.schema import Recipe
from pylate_fastmaxsim.recipes.data.collection import PAGES, Collection
from pylate_fastmaxsim.recipes.kind import kind_of

if TYPE_CHECKING:
    from PIL.Image import Image


def metric_names(recipe: Recipe, held_out: Dataset) -> list[str]:
    """nDCG@10, and of texts ``kl_divergence`` for rows with teacher scores or ``accuracy`` for rows with negatives."""
    if recipe.model.visual or len(held_out.column_names) == 2:
        return ["ndcg@10"]
    return ["ndcg@10", "kl_divergence" if recipe.loss.name == "distillation" else "accuracy"]


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
        names = [_digest(page) for page in own]
        pages |= dict(zip(names, files, strict=True))
        query = texts.setdefault(row[query_column], f"q{number}")
        relevant.setdefault(query, {}).update(dict.fromkeys(names, 1))
    corpus = {"_id": list(pages), PAGES: list(pages.values())}
    features = Features({"_id": Value("string"), PAGES: ImageFeature()})
    queries = {query: text for text, query in texts.items()}
    return Collection(Dataset.from_dict(corpus, features=features), queries, relevant)


def _digest(page: Image) -> str:
    return sha256(repr((page.mode, page.size)).encode() + page.tobytes()).hexdigest()


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


def metrics_of_rows(recipe: Recipe, rows: Dataset, scores: Tensor) -> dict[str, float]:
    """``kl_divergence`` or ``accuracy`` of the scores ``[N, n]`` (float64) of the query of each row and its documents."""
    if recipe.loss.name != "distillation":
        return {"accuracy": float((scores[:, 0] > scores[:, 1]).double().mean())}
    teacher = torch.tensor(rows[:][rows.column_names[-1]], dtype=torch.float64)
    return {"kl_divergence": float(kind_of(recipe.model).divergence(recipe.loss, scores, teacher))}
