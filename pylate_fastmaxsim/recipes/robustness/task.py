"""The settings and the data of a measurement: texts of queries and documents, who is relevant for whom, and texts to append."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor

from pylate_fastmaxsim.diagnostics.injection import COUNTS, NOISE
from pylate_fastmaxsim.diagnostics.robustness import TIMES
from pylate_fastmaxsim.pooling import Pooling
from pylate_fastmaxsim.recipes.data.collection import Collection, document_texts, is_the_query, titles
from pylate_fastmaxsim.recipes.errors import RecipeError

Append = Literal["auto", "text", "tokens"]


@dataclass(frozen=True)
class Task:
    """Queries and documents, of which each query has a gold one."""

    name: str  # of the data, for the report
    queries: list[str]
    documents: list[str]
    grades: Tensor  # [Nq, Nd], as in pylate_fastmaxsim.diagnostics.robustness
    fillers: list[str]  # texts that are gold for no query, which are appended to others
    own: list[int | None]  # which of the fillers each document is itself


@dataclass(frozen=True)
class Settings:
    """The options of the command, by their names; without ``poolings`` the default ones.

    Of more than ``max_queries`` or ``max_documents`` some are drawn; gold documents are always taken.
    """

    poolings: Sequence[Pooling] | None = None
    times: Sequence[int] = TIMES
    tokens: Sequence[int] = COUNTS
    append: Append = "auto"
    noise: float = NOISE
    seed: int = 0
    max_queries: int = 300
    max_documents: int = 2000


def texts_trained_on(rows: Dataset, held_out: Collection, settings: Settings) -> list[str]:
    """Positives of rows that were trained on, without those that are held out."""
    some = rows.select(_drawn(len(rows), settings.max_documents, settings.seed))
    column = some.select_columns([rows.column_names[1]])[:][rows.column_names[1]]
    texts = (text if isinstance(text, str) else text[0] for text in column)
    own = {*held_out.corpus["text"][:]}
    return [text for text in dict.fromkeys(texts) if text not in own]


def collection_task(name: str, collection: Collection, settings: Settings, fillers: list[str] | None = None) -> Task:
    """The task of a collection; the texts to append are ``fillers``, or its documents that are relevant for no query."""
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
    rows = collection.corpus.select(documents)[:]
    texts, column = document_texts(rows), {document: number for number, document in enumerate(documents)}
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
    asked = [collection.queries[query] for query in queries]
    return Task(name, asked, texts, grades, fillers, [own.get(number) for number in range(len(texts))])


def _drawn(count: int, most: int, seed: int) -> list[int]:
    return sorted(np.random.default_rng(seed).permutation(count)[:most].tolist())
