"""Results as files: rankings as a TREC run file, and the metrics of each query for pandas."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path

from pylate_fastmaxsim.files.replace import replace_file
from pylate_fastmaxsim.recipes.data.collection import IDS_AT_ONCE, Collection
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.evaluation.ranking import Ranking
from pylate_fastmaxsim.recipes.files import prepare_file
from pylate_fastmaxsim.recipes.search.significance import Scores

TAG = "fastmaxsim"

SUFFIXES = (".jsonl", ".tsv")


def write_run(file: Path, found: Ranking) -> None:
    """Write ``query Q0 document rank score tag`` for each result, ranks from 1; the file appears when it is complete.

    Scores have 9 digits, which tells all float32 numbers apart.
    """

    def write(scratch: str) -> None:
        with open(scratch, "w", encoding="utf-8") as lines:
            for query, documents in found.items():
                lines.writelines(
                    f"{query} Q0 {document} {rank} {score:.9g} {TAG}\n"
                    for rank, (document, score) in enumerate(documents.items(), start=1)
                )

    replace_file(file, write)


def require_ids_of_one_word(collection: Collection) -> None:
    """Refuse ids with a space, which a run file cannot hold."""
    ids = collection.corpus.select_columns("_id").iter(IDS_AT_ONCE)
    for name, part in (("query", list(collection.queries)), *(("document", rows["_id"]) for rows in ids)):
        for each in map(str, part):
            if each.split() != [each]:
                raise RecipeError(
                    f"--run: ids must have no white space, which separates the columns of a run file, but {each!r} is that "
                    f"of a {name}."
                )


def prepare_per_query(file: Path, inputs: Sequence[Path | None] = ()) -> None:
    """Make the folder of the file. RecipeError if it cannot be written, or has another ending."""
    if file.suffix not in SUFFIXES:
        raise RecipeError(f"--per-query must be a file that ends in {' or '.join(SUFFIXES)}, got {file}.")
    prepare_file("--per-query", file, inputs)


def write_per_query(file: Path, scores: Scores) -> None:
    """Write a row for each query and model: their names and each metric; the file appears when it is complete."""
    rows = [
        {"query": query, "model": model, **{name: values[query] for name, values in metrics.items()}}
        for model, metrics in scores.items()
        for query in next(iter(metrics.values()))
    ]

    def write(scratch: str) -> None:
        with open(scratch, "w", encoding="utf-8", newline="") as lines:
            if file.suffix == ".jsonl":
                lines.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            else:
                table = csv.DictWriter(lines, list(rows[0]), delimiter="\t", lineterminator="\n")
                table.writeheader()
                table.writerows(rows)

    replace_file(file, write)
