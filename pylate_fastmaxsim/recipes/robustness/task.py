"""The settings and the data of a measurement: queries and documents, who is relevant for whom, and what to append."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor

from pylate_fastmaxsim.diagnostics.injection import COUNTS, NOISE
from pylate_fastmaxsim.diagnostics.robustness import TIMES
from pylate_fastmaxsim.pooling import Pooling
from pylate_fastmaxsim.recipes.data.collection import (
    PAGES,
    Collection,
    document_texts,
    is_of_pages,
    is_the_query,
    titles,
)
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.evaluation.evaluate import collection_of_pages

if TYPE_CHECKING:
    from PIL.Image import Image

Append = Literal["auto", "text", "tokens"]


@dataclass(frozen=True)
class Task:
    """Queries and documents, texts or pages, of which each query has a gold one."""

    name: str  # of the data, for the report
    queries: dict[str, str]  # texts by their ids
    documents: Sequence[str] | Sequence[Image]
    grades: Tensor  # [Nq, Nd], as in pylate_fastmaxsim.diagnostics.robustness
    fillers: Sequence[str] | Sequence[Image]  # which are gold for no query, and are appended to others
    own: list[int | None]  # which of the fillers each document is itself


@dataclass(frozen=True)
class Settings:
    """The options of the command, by their names; without ``poolings`` the default ones.

    Of more than ``max_queries`` or ``max_documents`` some are drawn; gold documents are always taken.
    """

    poolings: Sequence[Pooling] = ()
    times: Sequence[int] = TIMES
    tokens: Sequence[int] = COUNTS
    append: Append = "auto"
    noise: float = NOISE
    seed: int = 0
    max_queries: int = 300
    max_documents: int = 2000


def trained_on(rows: Dataset, held_out: Collection, settings: Settings) -> Sequence[str] | Sequence[Image]:
    """Positives of rows that were trained on, without those that are held out."""
    some = rows.select(_drawn(len(rows), settings.max_documents, settings.seed))
    if is_of_pages(held_out.corpus):
        corpus, own = collection_of_pages(some).corpus, {*held_out.corpus["_id"][:]}
        return corpus.select([place for place, name in enumerate(corpus["_id"][:]) if name not in own])[PAGES]
    column = some.select_columns([rows.column_names[1]])[:][rows.column_names[1]]
    texts = (text if isinstance(text, str) else text[0] for text in column)
    own = {*held_out.corpus["text"][:]}
    return [text for text in dict.fromkeys(texts) if text not in own]


def collection_task(
    name: str, collection: Collection, settings: Settings, fillers: Sequence[str] | Sequence[Image] | None = None
) -> Task:
    """The task of a collection; what is appended are ``fillers``, or its documents that are relevant for no query."""
    place = {str(name): number for number, name in enumerate(collection.corpus["_id"])}
    gold = {
        query: {place[name]: grade for name, grade in grades.items() if grade > 0 and name in place}
        for query, grades in collection.judgements.items()
    }
    asked = [query for query, relevant in gold.items() if relevant]
    if not asked:
        raise RecipeError(
            "no query of the held-out data has a relevant document, and robustness needs one of each query."
        )
    queries = [asked[number] for number in _drawn(len(asked), settings.max_queries, settings.seed)]
    kept = {document for query in queries for document in gold[query]}
    order = np.random.default_rng(settings.seed).permutation(len(place)).tolist()
    others = [document for document in order if document not in kept]
    documents = sorted(kept | set(others[: max(0, settings.max_documents - len(kept))]))
    rows, pages = collection.corpus.select(documents), is_of_pages(collection.corpus)
    rows = rows if pages else rows[:]
    contents = rows[PAGES] if pages else document_texts(rows)
    column = {document: number for number, document in enumerate(documents)}
    grades = torch.zeros(len(queries), len(documents))
    for row, query in enumerate(queries):
        for document, grade in gold[query].items():
            grades[row, column[document]] = grade
        itself = column.get(place.get(query))
        if itself is not None and is_the_query(collection, query, titles(rows)[itself], rows["text"][itself]):
            grades[row, itself] = torch.nan
    own: dict[int, int] = {}
    if fillers is None:
        relevant = {document for each in gold.values() for document in each}
        # Of the whole collection: gold documents alone may be as many as are measured.
        free = sorted([document for document in order if document not in relevant][: settings.max_documents])
        own = {column[document]: filler for filler, document in enumerate(free) if document in column}
        fillers = document_texts(collection.corpus.select(free)[:])
    asked_texts = {query: collection.queries[query] for query in queries}
    return Task(name, asked_texts, contents, grades, fillers, [own.get(number) for number in range(len(documents))])


def _drawn(count: int, most: int, seed: int) -> list[int]:
    return sorted(np.random.default_rng(seed).permutation(count)[:most].tolist())
