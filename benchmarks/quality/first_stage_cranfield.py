"""What share of the hard negatives of exhaustive mining each first stage finds, on the Cranfield collection.

    python -m benchmarks first_stage_cranfield --data FOLDER    # measure, then print the table
    python -m benchmarks first_stage_cranfield --render         # only the table of the committed results

Model and table of token vectors are those of benchmarks.quality.static_cranfield: MaxSim of the outputs of
all-MiniLM-L6-v2, and a static model that is made of it without training. MaxSim with all documents gives the ten best that
are not relevant, the negatives of each judged question, and likewise of every seventh title, whose positive is its own
document. A first stage is asked for k candidates, positives among them. A SparseEncoder is not among the stages: there is no trained one
offline. What the encoder computes is kept in --work.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.tables import table
from benchmarks.quality.static_cranfield import Task, require_data
from pylate_fastmaxsim import BM25, StaticLateInteraction
from pylate_fastmaxsim.recipes.models.retriever import retriever_of
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


def read_collection(data: Path) -> tuple[list[str], dict[str, list[str]], list[str], torch.Tensor]:
    """Texts of the documents, training pairs by column, judged queries, and grades ``[Nq, Nd]`` float32."""
    documents, asked = (
        [json.loads(line) for line in (data / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
        for name in ("corpus", "queries")
    )
    places = {row["_id"]: place for place, row in enumerate(documents)}
    judged: dict[str, dict[int, int]] = {}
    with open(data / "qrels.tsv", encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines, delimiter="\t"):
            if (grade := int(row["score"])) > 0:
                judged.setdefault(row["query-id"], {})[places[row["corpus-id"]]] = grade
    queries = [row["text"] for row in asked if row["_id"] in judged]
    grades = torch.zeros(len(queries), len(documents))
    for query, row in enumerate(row for row in asked if row["_id"] in judged):
        for place, grade in judged[row["_id"]].items():
            grades[query, place] = grade
    both = [row for row in documents if row["title"] and row["text"]]
    pairs = {"query": [row["title"] for row in both], "positive": [row["text"] for row in both]}
    return [f"{row['title']} {row['text']}".strip() for row in documents], pairs, queries, grades


def encoded_texts(task: Task, texts: dict[str, list[str]], folder: Path) -> dict[str, Any]:
    """Token vectors of all texts in context, and the table; those of an earlier run if there are any."""
    file = folder / "encoded.pt"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        made = {
            name: retriever_of(task.encoder).encode(each, 32, is_query=name in QUERIES) for name, each in texts.items()
        }
        torch.save({**made, "table": task.table}, file)
    return torch.load(file, weights_only=False)


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


def measure(data: Path, work: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    documents, pairs, questions, grades = read_collection(data)
    place = {text: number for number, text in enumerate(documents)}
    titles, bodies = (column[::EVERY] for column in pairs.values())
    own = [place[f"{title} {text}".strip()] for title, text in zip(titles, bodies, strict=True)]
    positives = {
        "questions": [{*row.nonzero().flatten().tolist()} for row in grades > 0],
        "titles": [{each} for each in own],
    }
    texts = {"questions": questions, "titles": titles, "documents": documents}
    task = Task(data)
    encoded = encoded_texts(task, texts, work)
    wanted = {name: hard_negatives(encoded[name], encoded["documents"], positives[name]) for name in QUERIES}
    # Only tokens that occur are compared, renumbered from 0.
    model = StaticLateInteraction(encoded["table"], tokenizer=task.tokenizer, threshold=1.0)
    tokens = {name: model.token_ids(each) for name, each in texts.items()}
    used = torch.cat([each.ids for each in tokens.values()]).unique()
    tokens = {name: TokenIds(torch.searchsorted(used, each.ids).int(), each.offsets) for name, each in tokens.items()}
    for stage, model in first_stages(encoded["table"][used.long()], tokens["documents"]):
        vectors = model.documents(tokens["documents"])
        cell: dict[str, Any] = {}
        for name in QUERIES:
            _, found = model.search(tokens[name], vectors, max(KS))
            cell[name] = {str(k): round(share(wanted[name], found[:, :k]), 4) for k in KS}
        yield stage, cell


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, help="folder of the collection, in BEIR's layout")
    parser.add_argument("--work", type=Path, default=Path("runs/first_stage_cranfield"), help="folder for embeddings")


def cells(_: argparse.Namespace) -> dict[str, dict]:
    stages = ["BM25", *(f"{name}, {each}" for name in STATIC for each in THRESHOLDS)]
    return {stage: {} for stage in stages}


def run(_: str, cells: dict[str, dict], options: argparse.Namespace) -> Iterator[tuple[str, dict]]:
    if cells:
        yield from ((stage, cell) for stage, cell in measure(require_data(options), options.work) if stage in cells)


def markdown(content: dict) -> str:
    """The share of negatives that are found for each k, of the questions and of the titles."""
    cells = content["cells"]
    rows = [
        [name, *(f"{cell[queries][str(k)]:.0%}" for queries in QUERIES for k in KS)] for name, cell in cells.items()
    ]
    columns = [f"k = {k:,}" for k in KS]
    return table(["first stage", f"questions, {columns[0]}", *columns[1:], f"titles, {columns[0]}", *columns[1:]], rows)
