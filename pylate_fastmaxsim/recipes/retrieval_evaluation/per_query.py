"""The metrics of each query, in a file that pandas reads."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path

from pylate_fastmaxsim.files.replace import replace_file
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.files import prepare_file
from pylate_fastmaxsim.recipes.retrieval_evaluation.significance import Scores

SUFFIXES = (".jsonl", ".tsv")


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
