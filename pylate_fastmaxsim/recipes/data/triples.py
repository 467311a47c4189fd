"""ColBERT's JSON lines: a list of ids in each line, of a query, its positive and negatives, or of documents with scores."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from datasets import Dataset, Features, Sequence, Value
from datasets.exceptions import DatasetGenerationError

from pylate_fastmaxsim.recipes.data.delimited import open_text
from pylate_fastmaxsim.recipes.data.tables import show_progress_bars
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.files import parse_json

TRIPLES = {"query": Value("string"), "positive": Value("string"), "negatives": Sequence(Value("string"))}
SCORED = {
    "query": Value("string"),
    "documents": Sequence(Value("string")),
    "scores": Sequence(Value("float32")),
}


def has_lists(file: str) -> bool:
    """Tell whether the first line of a JSON file is a list that holds an id, and not an array of rows."""
    try:
        with open_text(file) as lines:
            row = parse_json(next(lines, ""))
    except (OSError, ValueError):  # read_triples or datasets say what is wrong
        return False
    return isinstance(row, list) and bool(row) and not isinstance(row[0], dict)


def read_triples(key: str, files: list[str]) -> Dataset:
    """Rows of lines ``[qid, pid+, pid-, ...]`` (query, positive, negatives) or ``[qid, [pid, score], ...]`` (query,
    documents, scores), ids as text.
    """
    with open_text(files[0]) as lines:
        scored = isinstance(parse_json(next(lines))[-1], list)
    status = [(each.st_size, each.st_mtime_ns, each.st_ctime_ns) for each in map(os.stat, files)]
    arguments = {"key": key, "files": files, "scored": scored, "status": [status]}
    try:
        with show_progress_bars():
            return Dataset.from_generator(_rows, Features(SCORED if scored else TRIPLES), gen_kwargs=arguments)
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, RecipeError):
            raise error.__cause__ from None
        raise


def _rows(key: str, files: list[str], scored: bool, status: Any) -> Iterator[dict[str, Any]]:
    for file in files:
        with open_text(file) as lines:
            for number, line in enumerate(lines, 1):
                try:
                    query, *documents = parse_json(line)
                    if scored:
                        ids, scores = zip(*documents, strict=True)
                        row = {
                            "query": _id(query),
                            "documents": list(map(_id, ids)),
                            "scores": list(map(float, scores)),
                        }
                    else:
                        positive, *negatives = map(_id, documents)
                        row = {"query": _id(query), "positive": positive, "negatives": negatives}
                except (ValueError, TypeError):
                    wanted = "[qid, [pid, score], ...]" if scored else "[qid, pid, pid, ...]"
                    raise RecipeError(f"{key}: line {number} of {file} must be {wanted}, as the first is.") from None
                yield row


def _id(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise TypeError
    return str(value)
