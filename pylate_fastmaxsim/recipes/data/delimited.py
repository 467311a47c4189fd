"""CSV and TSV files: how ``datasets`` reads them, all of it as text, with a line of column names or without."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

from datasets import Features, Value

from pylate_fastmaxsim.recipes.errors import RecipeError, first_line

# What a line of names begins with in files that may come without.
FIRST_NAMES = ("query", "anchor", "question", "qid", "pid", "docid", "id", "_id", "query_id", "document_id", "query-id")

# A line with two of these is one of names as well, in any order.
OTHER_NAMES = ("positive", "negative", "negative_1", "pos", "neg", "text", "title", "passage", "document", "answer")

TABS = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}

# Names of n columns without a line of names.
Names = Callable[[int], list[str]]


def names_of_rows(columns: int) -> list[str]:
    """The columns of triples, as those of MS MARCO and ColBERT."""
    if columns <= 3:
        return ["query", "positive", "negative"][:columns]
    return ["query", "positive", *(f"negative_{number}" for number in range(1, columns - 1))]


def names_of_texts(columns: int) -> list[str]:
    """The columns of a collection or of queries, as those of MS MARCO and ColBERT."""
    return ["_id", "text", "title"][:columns]


def read_options(key: str, files: list[str], names: Names | None, columns: list[str] | None = None) -> dict[str, Any]:
    """Options by which ``datasets`` reads .csv or .tsv files: every value is text, and an empty one is missing.

    The first line of a .csv names its columns, and that of a .tsv if there are no ``names``. Otherwise it does if it
    begins with one of FIRST_NAMES, has two of these and OTHER_NAMES, or has all of ``columns``; if not, ``names`` of the
    number of columns are theirs. A .tsv has no quotes.
    """
    tabs = ".tsv" in Path(files[0]).suffixes
    firsts = [_first_row(key, file, tabs) for file in files]
    having = [not tabs or names is None or _names_columns(first, columns) for first in firsts]
    if len(set(having)) > 1:
        raise RecipeError(
            f"{key}: the first line must name the columns in all files or in none, but it does in "
            f"{files[having.index(True)]} and not in {files[having.index(False)]}."
        )
    named, first = having[0], firsts[0]
    found = first if named else names(len(first))
    if "" in found or len(set(found)) < len(first):
        raise RecipeError(
            f"{key}: the first line of {files[0]} must name each of its columns once, got {', '.join(first)}."
        )
    options = dict(TABS) if tabs else {}
    if not named:
        options |= {"names": found, "header": None}
    texts = Features(dict.fromkeys(found, Value("string")))
    return options | {"features": texts, "keep_default_na": False, "na_values": [""]}


def _names_columns(first: list[str], columns: list[str] | None) -> bool:
    known = [name.lower() in (*FIRST_NAMES, *OTHER_NAMES) for name in first]
    return first[0].lower() in FIRST_NAMES or sum(known) > 1 or bool(columns and {*columns} <= {*first})


def open_text(file: str) -> IO[str]:
    """Open a file, which may be compressed by gzip."""
    if file.endswith(".gz"):
        return gzip.open(file, "rt", encoding="utf-8-sig", newline="")
    return open(file, encoding="utf-8-sig", newline="")


def _first_row(key: str, file: str, tabs: bool) -> list[str]:
    """The first row, of which the second may have no more values: pandas would take the first as the name of the row."""
    limit = csv.field_size_limit(2**31 - 1)  # by default shorter than a long document
    try:
        with open_text(file) as lines:
            rows = csv.reader(lines, **(TABS if tabs else {}))
            first, second = islice(chain(filter(None, rows), [[], []]), 2)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RecipeError(f"{key} cannot be loaded: {type(error).__name__}: {first_line(error)}") from error
    finally:
        csv.field_size_limit(limit)
    if not first:
        raise RecipeError(f"{key}: there are no rows in {file}.")
    if len(second) > len(first):
        raise RecipeError(
            f"{key}: the first row of {file} has {len(first)} values, but the second has {len(second)}: {', '.join(second)}."
        )
    return first
