"""Judgements (qrels): the grade of a document for a query, in the layout of BEIR or of TREC."""

from __future__ import annotations

import csv
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

from pylate_fastmaxsim.recipes.data.delimited import open_text
from pylate_fastmaxsim.recipes.data.tables import is_text, table_failure
from pylate_fastmaxsim.recipes.errors import RecipeError

JUDGEMENT_COLUMNS = ("query-id", "corpus-id", "score")

# TREC's second column, which nothing reads.
ITERATIONS = ("0", "Q0")
LINES_LOOKED_AT = 100


def is_trec(file: str | Path) -> bool:
    """Tell whether the first lines of a file are judgements in the layout of TREC: ``qid 0 docid grade``, with white space."""
    try:
        with open_text(str(file)) as lines:
            rows = [line.split() for line in islice(lines, LINES_LOOKED_AT) if line.strip()]
    except (OSError, UnicodeDecodeError):  # read_judgements or datasets say what is wrong
        return False
    return bool(rows) and all(len(row) == 4 and row[1] in ITERATIONS and row[3].lstrip("-").isdigit() for row in rows)


def read_judgements(key: str, file: str | Path) -> Dataset:
    """Judgements from a file with tabs and column names, as of BEIR, or from one of TREC; ids are text."""
    try:
        with open_text(str(file)) as lines:
            lines = [line for line in lines if line.strip()]
        names, *_ = csv.reader(lines, delimiter="\t")
        trec = not {*names} >= {*JUDGEMENT_COLUMNS} and len(lines[0].split()) == 4
        rows = list(map(_trec_row, lines) if trec else csv.DictReader(lines, delimiter="\t"))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise table_failure(key, error) from error
    if not rows:
        raise RecipeError(f"{key}: there are no rows in {file}.")
    if None in rows:
        raise RecipeError(
            f"{key}: a line of {file} must be qid 0 docid grade, got {lines[rows.index(None)].strip()!r}."
        )
    if not rows[0].keys() >= set(JUDGEMENT_COLUMNS):
        raise RecipeError(
            f"{key}: the first line of {file} must name the columns {', '.join(JUDGEMENT_COLUMNS)}, with tabs between them, "
            "or be qid 0 docid grade, as in TREC."
        )
    return Dataset.from_dict({column: [row[column] for row in rows] for column in JUDGEMENT_COLUMNS})


def _trec_row(line: str) -> dict[str, str] | None:
    fields = line.split()
    return dict(zip(JUDGEMENT_COLUMNS, (fields[0], *fields[2:]), strict=True)) if len(fields) == 4 else None


def grades_by_query(key: str, rows: Dataset) -> dict[str, dict[str, int]]:
    """The grade of each judged document, for each query. Grades below 0 are 0, not relevant, as for trec_eval."""
    for column in JUDGEMENT_COLUMNS[:2]:
        require_ids(key, "the judgements", rows, column)
    judgements: dict[str, dict[str, int]] = {}
    for query, document, grade in zip(*(rows[:][column] for column in JUDGEMENT_COLUMNS), strict=True):
        try:
            whole = _integer(grade)
        except (TypeError, ValueError, OverflowError):  # not a number, not a whole one, nan or infinite
            raise RecipeError(
                f"{key}: the grade of query {query} and document {document} must be an integer, got {grade!r}."
            ) from None
        first = judgements.setdefault(str(query), {}).setdefault(str(document), whole)
        if whole != first:
            raise RecipeError(
                f"{key}: the query {query} and the document {document} must have one grade, but are judged {first} and "
                f"{whole}."
            )
    return {query: {name: max(grade, 0) for name, grade in grades.items()} for query, grades in judgements.items()}


def _integer(grade: Any) -> int:
    """A grade as an integer. pandas stores integers as floats in columns that had missing values."""
    whole = int(float(grade))
    if float(grade) != whole or abs(whole) >= 2**31:  # metrics compute with them
        raise ValueError
    return whole


def require_ids(key: str, where: str, table: Dataset, column: str) -> None:
    """Refuse rows without an id, and ids of several types."""
    row = pc.index(pc.is_null(table.data.column(column)), True).as_py()
    if row >= 0:
        raise RecipeError(f"{key}: {column!r} of {where} must hold an id in every row, but row {row} has none.")
    # datasets keeps rows of several types as JSON.
    if not (is_text(table, column) or pa.types.is_primitive(table.data.column(column).type)):
        raise RecipeError(f"{key}: {column!r} of {where} must be text in all rows or a number in all rows.")


def relevant_pairs(key: str, rows: Dataset) -> Dataset:
    """The query and the document of each judgement with a grade above 0, under the names that they have in ``rows``."""
    pairs = [
        (query, document)
        for query, grades in grades_by_query(key, rows).items()
        for document, grade in grades.items()
        if grade > 0
    ]
    if not pairs:
        raise RecipeError(f"{key}: no document is judged relevant, with a grade above 0.")
    return Dataset.from_dict(dict(zip(JUDGEMENT_COLUMNS[:2], zip(*pairs, strict=True), strict=True)))
