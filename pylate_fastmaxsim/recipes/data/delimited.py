"""CSV and TSV files: how ``datasets`` reads them, all of it as text, with a line of column names or without."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from datasets import Features, Value

from pylate_fastmaxsim.recipes.errors import RecipeError, first_line

# What a line of names begins with in files that may come without.
FIRST_NAMES = ("query", "anchor", "question", "qid", "pid", "docid", "id", "_id", "query_id", "document_id", "query-id")

# Names of n columns without a line of names.
Names = Callable[[int], list[str]]


def names_of_rows(columns: int) -> list[str]:
    """The columns of triples, as those of MS MARCO and ColBERT.

    Examples
    --------
    >>> from pylate_fastmaxsim.recipes.data.delimited import names_of_rows
    >>> names_of_rows(3), names_of_rows(4)[2:]
    (['query', 'positive', 'negative'], ['negative_1', 'negative_2'])
    """
    if columns <= 3:
        return ["query", "positive", "negative"][:columns]
    return ["query", "positive", *(f"negative_{number}" for number in range(1, columns - 1))]


def names_of_texts(columns: int) -> list[str]:
    """The columns of a collection or of queries, as those of MS MARCO and ColBERT."""
    return ["_id", "text", "title"][:columns]


def read_options(key: str, file: str, names: Names | None, columns: list[str] | None = None) -> dict[str, Any]:
    """Options by which ``datasets`` reads a .csv or .tsv file: every value is text, and an empty one is missing.

    The first line of a .csv names its columns, and that of a .tsv if there are no ``names``. Otherwise it does if it
    begins with one of FIRST_NAMES or has all of ``columns``; if not, ``names`` of the number of columns are theirs. A
    .tsv has no quotes.
    """
    tabs = ".tsv" in Path(file).suffixes
    first = _first_row(key, file, tabs)
    named = not tabs or names is None or first[0].lower() in FIRST_NAMES or bool(columns and {*columns} <= {*first})
    found = first if named else names(len(first))
    if len(set(found)) < len(first):
        raise RecipeError(
            f"{key}: the first line of {file} must name each of its columns once, got {', '.join(first)}."
        )
    options = {"sep": "\t", "quoting": csv.QUOTE_NONE} if tabs else {"sep": ","}
    if not named:
        options |= {"names": found, "header": None}
    texts = Features(dict.fromkeys(found, Value("string")))
    return options | {"features": texts, "keep_default_na": False, "na_values": [""]}


def open_text(file: str) -> IO[str]:
    """Open a file, which may be compressed by gzip."""
    if file.endswith(".gz"):
        return gzip.open(file, "rt", encoding="utf-8-sig", newline="")
    return open(file, encoding="utf-8-sig", newline="")


def _first_row(key: str, file: str, tabs: bool) -> list[str]:
    try:
        with open_text(file) as lines:
            if tabs:
                return next(lines).rstrip("\r\n").split("\t")
            return next(csv.reader(lines))
    except StopIteration:
        raise RecipeError(f"{key}: there are no rows in {file}.") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RecipeError(f"{key} cannot be loaded: {type(error).__name__}: {first_line(error)}") from error
