"""What share of the hard negatives of exhaustive mining each first stage finds, on the Cranfield collection.

    python -m benchmarks first_stage_cranfield --data FOLDER    # measure, then print the table

Model and table of token vectors are those of benchmarks.quality.static_cranfield: MaxSim of the outputs of
all-MiniLM-L6-v2, and a static model that is made of it without training. MaxSim with all documents gives the ten best that
are not relevant, the negatives of each judged question, and likewise of every seventh title, whose positive is its own
document. A first stage is asked for k candidates, positives among them. A SparseEncoder is not among
the stages: there is no trained one offline.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.tables import table
from benchmarks.quality.static_cranfield import Task, add_options  # noqa: F401
from pylate_fastmaxsim import BM25, StaticLateInteraction
from pylate_fastmaxsim.retrieval.search import search
from pylate_fastmaxsim.retrieval.static.tokens import TokenIds

KS = (10, 30, 100, 300, 1000)
QUERIES = ("questions", "titles")
NEGATIVES = 10
THRESHOLDS = (0.8, 0.7, 0.6, 0.5, 0.4)
STATIC = {
    "static": {},
    "static, IDF": {"query_weights": "idf"},
    "static, BM25's weights": {"query_weights": "idf", "document_weights": BM25()},
}
EVERY = 7  # of the titles


def hard_negatives(queries: Any, documents: Any, positives: list[set[int]]) -> list[set[int]]:
    """The best documents of each query by MaxSim with all of them, without its positives."""
    _, found = search(queries, [documents], NEGATIVES + max(map(len, positives)))
    left = ([x for x in row if x not in own] for row, own in zip(found.tolist(), positives, strict=True))
    return [{*row[:NEGATIVES]} for row in left]


def first_stages(vectors: Tensor, documents: TokenIds) -> Iterator[tuple[str, StaticLateInteraction]]:
    yield "BM25", StaticLateInteraction.bm25(None, len(vectors)).fit(documents)
    for name, weights in STATIC.items():
        for threshold in THRESHOLDS:
            yield f"{name}, {threshold}", StaticLateInteraction(vectors, threshold=threshold, **weights).fit(documents)


def share(wanted: list[set[int]], found: Tensor) -> float:
    """Of the documents that are wanted for each query, those that are found."""
    return sum(len(each & {*row}) for each, row in zip(wanted, found.tolist(), strict=True)) / sum(map(len, wanted))


def measured(task: Task) -> Iterator[tuple[str, dict[str, Any]]]:
    rows = list(task.collection.corpus)
    place = {row["_id"]: number for number, row in enumerate(rows)}
    graded = (task.collection.judgements[query] for query in task.collection.queries)
    titled = [number for number, row in enumerate(rows) if row["title"] and row["text"]][::EVERY]
    positives = {
        "questions": [{place[each] for each, grade in grades.items() if grade > 0} for grades in graded],
        "titles": [{number} for number in titled],
    }
    titles = [rows[number]["title"] for number in titled]
    texts = {"questions": task.queries, "titles": titles, "documents": task.documents}
    encoded = {name: task.encoded(each, name in QUERIES) for name, each in texts.items()}
    wanted = {name: hard_negatives(encoded[name], encoded["documents"], positives[name]) for name in QUERIES}
    # Only tokens that occur are compared, renumbered from 0.
    model = StaticLateInteraction(task.table, tokenizer=task.tokenizer, threshold=0.5)
    tokens = {name: model.token_ids(each) for name, each in texts.items()}
    used = torch.cat([each.ids for each in tokens.values()]).unique()
    tokens = {name: TokenIds(torch.searchsorted(used, each.ids).int(), each.offsets) for name, each in tokens.items()}
    for stage, model in first_stages(task.table[used.long()], tokens["documents"]):
        vectors = model.documents(tokens["documents"])
        cell: dict[str, Any] = {}
        for name in QUERIES:
            _, found = model.search(tokens[name], vectors, max(KS))
            cell[name] = {str(k): round(share(wanted[name], found[:, :k]), 4) for k in KS}
        yield stage, cell


def cells(_: argparse.Namespace) -> dict[str, dict]:
    stages = ["BM25", *(f"{name}, {each}" for name in STATIC for each in THRESHOLDS)]
    return {stage: {} for stage in stages}


def run(_: str, cells: dict[str, dict], options: argparse.Namespace) -> Iterator[tuple[str, dict]]:
    if cells:
        yield from ((stage, cell) for stage, cell in measured(Task(options)) if stage in cells)


def markdown(content: dict) -> str:
    """The share of negatives that are found for each k, of the questions and of the titles."""
    cells = content["cells"]
    rows = [
        [name, *(f"{cell[queries][str(k)]:.0%}" for queries in QUERIES for k in KS)] for name, cell in cells.items()
    ]
    columns = [f"k = {k:,}" for k in KS]
    return table(["first stage", f"questions, {columns[0]}", *columns[1:], f"titles, {columns[0]}", *columns[1:]], rows)
