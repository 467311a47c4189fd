"""Retrieval in BEIR's layout: a corpus, queries and judgements, scored by exact search over the whole corpus."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
from datasets import Dataset, Value, get_dataset_config_names
from pylate.models import ColBERT
from tqdm import tqdm

from pylate_fastmaxsim.integrations.log import log_once
from pylate_fastmaxsim.ops.pooled import Max, Pooling
from pylate_fastmaxsim.recipes.config.schema import EvaluationSection
from pylate_fastmaxsim.recipes.data.tables import (
    has_plain_files,
    is_text,
    load_subset,
    load_table,
    require_columns,
    require_texts,
    require_utf8,
    table_failure,
)
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.models.encode import BATCHES_AT_ONCE, encode
from pylate_fastmaxsim.retrieval.search import search
from pylate_fastmaxsim.tokens import TokenBatch

KEY = "evaluation.beir"
METRICS = ("ndcg@10", "mrr@10", "recall@100")
DEPTH = 100  # ranks that the metrics look at
JUDGEMENT_COLUMNS = ("query-id", "corpus-id", "score")

IDS_AT_ONCE = 10_000


@dataclass(frozen=True)
class Collection:
    """A retrieval task.

    Parameters
    ----------
    corpus
        Documents with the columns ``_id``, ``text`` and perhaps ``title``, on disk.
    queries
        Text of each judged query by its id.
    judgements
        For each of them, the grade of each judged document: 0 is not relevant.
    """

    corpus: Dataset
    queries: dict[str, str]
    judgements: dict[str, dict[str, int]]


def load_collection(section: EvaluationSection) -> Collection:
    """Load what ``evaluation.beir`` names.

    On the Hub, judgements are the subset ``qrels`` or ``default`` of the data set, or the data set of that name
    with ``-qrels`` behind it. In a folder of files they are ``qrels/SPLIT.tsv`` or ``qrels.tsv``.

    Raises
    ------
    RecipeError
        A table or a column is missing or holds no texts, a row has no id or that of another, a grade is no integer, a
        document has two grades for one query, there are no judgements for any query, or no judged document is in the
        corpus.
    """
    corpus = load_subset(KEY, section.beir, "corpus", ("_id", "text"))
    texts = load_subset(KEY, section.beir, "queries", ("_id", "text"))
    for subset, table in (("corpus", corpus), ("queries", texts)):
        _require_ids(f"the subset {subset}", table, "_id")
        _require_distinct_ids(subset, table)
    # Lists and numbers would be encoded as Python prints them.
    require_texts(f"{KEY}: 'text' of the subset queries", texts, "text")
    require_texts(f"{KEY}: 'text' of the subset corpus", corpus, "text", gaps=True)
    if "title" in corpus.column_names and corpus.features["title"] != Value("null"):  # null in all rows
        require_texts(f"{KEY}: 'title' of the subset corpus", corpus, "title", gaps=True)
    for subset, table in (("queries", texts), ("corpus", corpus)):
        for column in table.column_names:
            if is_text(table, column):
                require_utf8(f"{KEY}: {column!r} of the subset {subset}", table.data.column(column))
    judgements = _by_query(_load_judgements(section))
    queries = {str(row["_id"]): row["text"] for row in texts if str(row["_id"]) in judgements}
    missing = next((query for query in judgements if query not in queries), None)
    if missing is not None or not queries:
        reason = f"the query {missing} is judged but is not among the queries" if queries else "no query is judged"
        raise RecipeError(f"{KEY}: {section.beir} does not fit together: {reason}.")
    _require_judged_documents(section.beir, corpus, judgements)
    return Collection(corpus, queries, judgements)


def _by_query(rows: Dataset) -> dict[str, dict[str, int]]:
    """The grade of each judged document, for each query."""
    for column in JUDGEMENT_COLUMNS[:2]:
        _require_ids("the judgements", rows, column)
    judgements: dict[str, dict[str, int]] = {}
    for query, document, grade in zip(*(rows[:][column] for column in JUDGEMENT_COLUMNS), strict=True):
        try:
            whole = _integer(grade)
        except (TypeError, ValueError, OverflowError):  # not a number, not a whole one, nan or infinite
            raise RecipeError(
                f"{KEY}: the grade of query {query} and document {document} must be an integer, got {grade!r}."
            ) from None
        first = judgements.setdefault(str(query), {}).setdefault(str(document), whole)
        if whole != first:
            raise RecipeError(
                f"{KEY}: the query {query} and the document {document} must have one grade, but are judged {first} and "
                f"{whole}."
            )
    return judgements


def _integer(grade: Any) -> int:
    """A grade as an integer. pandas stores integers as floats in columns that had missing values."""
    if float(grade) != int(float(grade)):
        raise ValueError
    return int(float(grade))


def _require_judged_documents(name: str, corpus: Dataset, judgements: dict[str, dict[str, int]]) -> None:
    """Refuse a corpus without any judged document; log how many judged documents it lacks."""
    judged = {document for grades in judgements.values() for document in grades}
    missing = set(judged)
    for rows in corpus.select_columns("_id").iter(IDS_AT_ONCE):
        missing.difference_update(map(str, rows["_id"]))
    if len(missing) == len(judged):
        raise RecipeError(
            f"{KEY}: {name} does not fit together: no judged document is in the corpus, whose first id is "
            f"{str(corpus[0]['_id'])!r} where a judged one is {next(iter(next(iter(judgements.values()))))!r}."
        )
    # Logged once per run, not by every process.
    if missing and int(os.environ.get("RANK", "0")) == 0:
        log_once(
            "%s",
            f"{KEY}: {len(missing)} of {len(judged)} judged documents are not in the corpus of {name}, for example "
            f"{min(missing)!r}; no search finds them, which lowers the metrics where they are relevant.",
        )


def _require_ids(where: str, table: Dataset, column: str) -> None:
    """Refuse rows without an id."""
    row = pc.index(pc.is_null(table.data.column(column)), True).as_py()
    if row >= 0:
        raise RecipeError(f"{KEY}: {column!r} of {where} must hold an id in every row, but row {row} has none.")


def _require_distinct_ids(subset: str, table: Dataset) -> None:
    """Refuse repeated ids, as of passages with the id of their document: only one of them would count."""
    counted = pc.value_counts(table.data.column("_id"))
    repeated = pc.index(pc.greater(counted.field("counts"), 1), True).as_py()
    if repeated >= 0:
        raise RecipeError(
            f"{KEY}: '_id' of the subset {subset} must be another in each row, but {counted.field('values')[repeated]} "
            "is that of several."
        )


def _load_judgements(section: EvaluationSection) -> Dataset:
    name, split = section.beir, section.split
    if has_plain_files(name):
        files = [file for file in (Path(name, "qrels", f"{split}.tsv"), Path(name, "qrels.tsv")) if file.is_file()]
        if not files:
            raise RecipeError(f"{KEY}: the folder {name} must hold qrels/{split}.tsv or qrels.tsv.")
        return _read_judgements(files[0])
    subset = next((subset for subset in ("qrels", "default") if subset in _subsets(name)), None)
    if subset is None:
        table = load_table(KEY, f"{name}-qrels", split=split)
    else:
        table = load_table(KEY, name, subset, split=split)
    return require_columns(KEY, "qrels", table, JUDGEMENT_COLUMNS)


def _read_judgements(file: Path) -> Dataset:
    """Judgements from a .tsv file, with ids as text; ``datasets`` would read 007 as 7."""
    try:
        with open(file, encoding="utf-8-sig", newline="") as lines:
            rows = list(csv.DictReader(lines, delimiter="\t"))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise table_failure(KEY, error) from error
    if not rows:
        raise RecipeError(f"{KEY}: there are no rows in {file}.")
    if not rows[0].keys() >= set(JUDGEMENT_COLUMNS):
        raise RecipeError(
            f"{KEY}: the first line of {file} must name the columns {', '.join(JUDGEMENT_COLUMNS)}, with tabs between them."
        )
    return Dataset.from_dict({column: [row[column] for row in rows] for column in JUDGEMENT_COLUMNS})


def _subsets(name: str) -> list[str]:
    try:
        return get_dataset_config_names(name)
    except Exception as error:  # as in load_table
        raise table_failure(KEY, error) from error


def evaluate_collection(
    model: ColBERT, collection: Collection, batch_size: int, pooling: Pooling = Max()
) -> dict[str, float]:
    """nDCG@10, MRR@10 and Recall@100 of exact search, averaged over the judged queries."""
    # ranx compiles for seconds when it is imported.
    from ranx import Qrels, Run, evaluate

    run = Run(retrieve(model, collection, batch_size, pooling))
    scores = evaluate(Qrels(collection.judgements), run, list(METRICS), make_comparable=True)
    return {name: float(scores[name]) for name in METRICS}


def retrieve(
    model: ColBERT, collection: Collection, batch_size: int, pooling: Pooling = Max()
) -> dict[str, dict[str, float]]:
    """The scores of the best documents of each query, by their ids.

    A document that is the query itself is no result, as in ArguAna and Quora.
    """
    queries = encode(model, list(collection.queries.values()), batch_size, is_query=True, show_progress=True)
    scores, positions = search(queries, _encoded(model, collection.corpus, batch_size), DEPTH + 1, pooling=pooling)
    return {
        query: _results(collection, query, found, best)
        for query, found, best in zip(collection.queries, positions.tolist(), scores.tolist(), strict=True)
    }


def _results(collection: Collection, query: str, positions: list[int], scores: list[float]) -> dict[str, float]:
    rows = collection.corpus[positions]
    results = [
        (document, score)
        for document, score, title, text in zip(map(str, rows["_id"]), scores, titles(rows), rows["text"], strict=True)
        if document != query or not is_query(collection, query, title, text)
    ]
    return dict(results[:DEPTH])


def is_query(collection: Collection, query: str, title: str | None, text: str | None) -> bool:
    """Whether the document that has the id of a query is that query.

    BEIR's evaluator compares ids only, and drops documents wrongly where queries and documents are numbered
    independently, as in Cranfield. ArguAna's queries are documents without title; SciDocs' queries are titles.
    """
    if collection.judgements[query].get(query, 0) > 0:
        return False
    wanted = (collection.queries[query] or "").strip()
    return wanted != "" and wanted in ((title or "").strip(), (text or "").strip(), _joined(title, text))


def _encoded(model: ColBERT, corpus: Dataset, batch_size: int) -> Iterator[TokenBatch]:
    with tqdm(total=len(corpus), desc="Searching", unit=" documents", unit_scale=True) as progress:
        for rows in corpus.iter(BATCHES_AT_ONCE * batch_size):
            texts = document_texts(rows)
            yield encode(model, texts, batch_size, is_query=False)
            progress.update(len(texts))


def document_texts(rows: dict[str, list]) -> list[str]:
    """Title and text of each document of a corpus."""
    return [_joined(title, text) for title, text in zip(titles(rows), rows["text"], strict=True)]


def titles(rows: dict[str, list]) -> list[str | None]:
    """The title of each document, or None."""
    return rows.get("title") or [None] * len(rows["text"])


def _joined(title: str | None, text: str | None) -> str:
    return f"{title or ''} {text or ''}".strip()
