"""Held-out rows of texts as a retrieval task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from torch.nn import functional as F

from pylate_fastmaxsim.recipes.config.schema import Recipe
from pylate_fastmaxsim.recipes.evaluation.beir import Collection


def names_of_metrics(recipe: Recipe, held_out: Dataset) -> list[str]:
    """nDCG@10, and ``kl_divergence`` for rows with teacher scores or ``accuracy`` for rows with negatives."""
    if recipe.loss.name == "distillation":
        return ["ndcg@10", "kl_divergence"]
    return ["ndcg@10", "accuracy"] if len(held_out.column_names) > 2 else ["ndcg@10"]


@dataclass(frozen=True)
class HeldOutTask:
    """Ids of queries and documents by their texts, and the relevant documents of each query."""

    queries: dict[str, str]
    documents: dict[str, str]
    relevant: dict[str, set[str]]


def task_of(recipe: Recipe, held_out: Dataset) -> HeldOutTask:
    """The held-out queries, over all held-out documents.

    The relevant document of a query is its first one, or for distillation the teacher's best. Equal texts are one query
    or one document, so that a query that stands in several rows has the relevant documents of all of them.
    """
    task = HeldOutTask({}, {}, {})
    for number, row in enumerate(held_out):
        text, documents = texts_of(recipe, row)
        best = 0
        if recipe.loss.name == "distillation":
            scores = list(row.values())[-1]
            best = scores.index(max(scores))
        query = task.queries.setdefault(text, f"q{number}")
        ids = [task.documents.setdefault(document, f"d{number}-{place}") for place, document in enumerate(documents)]
        task.relevant.setdefault(query, set()).add(ids[best])
    return task


def texts_of(recipe: Recipe, row: dict[str, Any]) -> tuple[str, list[str]]:
    """The query of a row and its documents."""
    query, *columns = row.values()
    return query, columns[0] if recipe.loss.name == "distillation" else columns


def collection_of_task(task: HeldOutTask) -> Collection:
    """The same as a collection, every relevant document of grade 1."""
    return Collection(
        Dataset.from_dict({"_id": list(task.documents.values()), "text": list(task.documents)}),
        {query: text for text, query in task.queries.items()},
        {query: dict.fromkeys(sorted(documents), 1) for query, documents in task.relevant.items()},
    )


def places_of_rows(recipe: Recipe, rows: Dataset, task: HeldOutTask) -> tuple[Tensor, Tensor]:
    """Where the query ``[N]`` and the documents ``[N, n]`` of each row are among those of a task."""
    queries, documents = ({text: place for place, text in enumerate(texts)} for texts in (task.queries, task.documents))
    found = [texts_of(recipe, row) for row in rows]
    return (
        torch.tensor([queries[query] for query, _ in found]),
        torch.tensor([[documents[text] for text in texts] for _, texts in found]),
    )


def metrics_of_rows(recipe: Recipe, rows: Dataset, scores: Tensor, temperature: float = 1.0) -> dict[str, float]:
    """``kl_divergence`` or ``accuracy`` of the scores ``[N, n]`` (float64) of the query of each row and its documents.

    The KL divergence is that of scores divided by ``temperature``, times the square of that.
    """
    if recipe.loss.name != "distillation":
        return {"accuracy": float((scores[:, 0] > scores[:, 1]).double().mean())}
    teacher = torch.tensor(rows[:][rows.column_names[-1]], dtype=torch.float64)
    student, teacher = ((each / temperature).log_softmax(1) for each in (scores, teacher))
    divergence = F.kl_div(student, teacher, log_target=True, reduction="batchmean") * temperature**2
    return {"kl_divergence": float(divergence)}
