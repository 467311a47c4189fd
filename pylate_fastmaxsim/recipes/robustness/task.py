"""What robustness is measured on: texts of queries and documents, who is relevant for whom, and texts to append."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor

from pylate_fastmaxsim.recipes.config.schema import Recipe
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.evaluation import held_out
from pylate_fastmaxsim.recipes.evaluation.beir import Collection, document_texts, is_query, titles
from pylate_fastmaxsim.recipes.evaluation.targets import RecipeData


@dataclass(frozen=True)
class Task:
    """Queries and documents, of which each query has a gold one.

    Parameters
    ----------
    name
        Of the data, for the report.
    queries, documents
        Texts.
    grades
        ``[Nq, Nd]``, as in :mod:`pylate_fastmaxsim.diagnostics.robustness`.
    fillers
        Texts of documents that are gold for no query, which are appended to others.
    own
        Which of the fillers each document is itself, or None.
    """

    name: str
    queries: list[str]
    documents: list[str]
    grades: Tensor
    fillers: list[str]
    own: list[int | None]


@dataclass(frozen=True)
class Limits:
    """How many queries and documents are taken, and the seed of the choice. Gold documents are always taken."""

    max_queries: int = 300
    max_documents: int = 2000
    seed: int = 0


def task_of(recipe: Recipe, data: RecipeData, limits: Limits) -> Task:
    """The task of what a recipe is evaluated on.

    Raises
    ------
    RecipeError
        It is evaluated on nothing, or on NanoBEIR, which is several collections.
    """
    if data.collection is not None:
        return collection_task(recipe.evaluation.beir, data.collection, limits)
    if data.nano_beir is not None:
        raise RecipeError(
            "evaluation.nano_beir names several collections, and robustness measures one; name it with --beir, or hold rows "
            "out with --set evaluation.nano_beir=null --set evaluation.rows=300."
        )
    if data.held_out is None:
        raise RecipeError(
            "evaluation names no held-out data, which robustness is measured on; set evaluation.rows to what the training "
            "set it to, or name a collection with --beir."
        )
    return _held_out_task(recipe, data, limits)


def _held_out_task(recipe: Recipe, data: RecipeData, limits: Limits) -> Task:
    """As the evaluation of held-out rows; the texts to append are positives that were trained on."""
    found = held_out.collection_of(recipe, data.held_out)
    queries, corpus = list(found.queries.values()), found.corpus["text"][:]
    place = {name: number for number, name in enumerate(found.corpus["_id"])}
    gold = [{place[name]: 1.0 for name in found.judgements[query]} for query in found.queries]
    chosen, documents = _chosen(gold, len(corpus), limits)
    texts = [corpus[document] for document in documents]
    return Task(
        f"{len(data.held_out)} rows held out of {recipe.name}",
        [queries[query] for query in chosen],
        texts,
        _grades([gold[query] for query in chosen], documents),
        _trained_on(recipe, data.train, set(corpus), limits),
        [None] * len(texts),
    )


def _trained_on(recipe: Recipe, rows: Dataset, held_out: set[str], limits: Limits) -> list[str]:
    some = rows.select(_drawn(len(rows), limits.max_documents, limits.seed))
    column = some.select_columns([rows.column_names[1]])[:][rows.column_names[1]]
    texts = (text if isinstance(text, str) else text[0] for text in column)
    return [text for text in dict.fromkeys(texts) if text not in held_out]


def collection_task(name: str, collection: Collection, limits: Limits) -> Task:
    """A collection in BEIR's layout; the texts to append are its documents that are relevant for no query."""
    place = {str(document): number for number, document in enumerate(collection.corpus["_id"])}
    judged = {
        query: {place[document]: float(grade) for document, grade in grades.items() if document in place}
        for query, grades in collection.judgements.items()
    }
    asked = [query for query, grades in judged.items() if any(grade > 0 for grade in grades.values())]
    relevant = {document for grades in judged.values() for document, grade in grades.items() if grade > 0}
    gold = [judged[query] for query in asked]
    chosen, documents = _chosen(gold, len(place), limits)
    rows = collection.corpus.select(documents)[:]
    texts, ids = document_texts(rows), [str(document) for document in rows["_id"]]
    grades = _grades([gold[query] for query in chosen], documents)
    at = {document: number for number, document in enumerate(ids)}
    for row, query in enumerate(asked[number] for number in chosen):
        column = at.get(query)
        if column is not None and is_query(collection, query, titles(rows)[column], rows["text"][column]):
            grades[row, column] = torch.nan
    free = [number for number, document in enumerate(documents) if document not in relevant]
    own = {number: filler for filler, number in enumerate(free)}
    return Task(
        name,
        [collection.queries[asked[number]] for number in chosen],
        texts,
        grades,
        [texts[number] for number in free],
        [own.get(number) for number in range(len(texts))],
    )


def _chosen(gold: list[Mapping[int, float]], num_documents: int, limits: Limits) -> tuple[list[int], list[int]]:
    """Which queries, and which documents: the gold ones of these and others up to the limit."""
    if not gold:
        raise RecipeError(
            "no query of the held-out data has a relevant document, and robustness needs one of each query."
        )
    queries = _drawn(len(gold), limits.max_queries, limits.seed)
    kept = {document for query in queries for document, grade in gold[query].items() if grade > 0}
    order = np.random.default_rng(limits.seed).permutation(num_documents).tolist()
    others = [document for document in order if document not in kept]
    return queries, sorted(kept | set(others[: max(0, limits.max_documents - len(kept))]))


def _drawn(count: int, most: int, seed: int) -> list[int]:
    return sorted(np.random.default_rng(seed).permutation(count)[:most].tolist())


def _grades(gold: list[Mapping[int, float]], documents: list[int]) -> Tensor:
    place = {document: number for number, document in enumerate(documents)}
    grades = torch.zeros(len(gold), len(documents))
    for row, judged in enumerate(gold):
        for document, grade in judged.items():
            if document in place:
                grades[row, place[document]] = grade
    return grades
