"""Write mined distillation data, in the layout of ``lightonai/ms-marco-en-bge``."""

from __future__ import annotations

import functools
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from datasets import Dataset

from pylate_fastmaxsim.files.record import write_record
from pylate_fastmaxsim.files.replace import remove_file, replace_file, replace_folder
from pylate_fastmaxsim.recipes.mining.pairs import Pairs
from pylate_fastmaxsim.recipes.mining.teacher import Candidates

CARD = "README.md"
SUMMARY_FILE = "mining.json"  # written last: data with it are complete
# In the order in which new ones come into place.
OWN_FILES = ("queries.parquet", "documents.parquet", "train.parquet", CARD, SUMMARY_FILE)
# Where the summary of data that are being replaced waits, in the folder of unfinished work.
OLD_SUMMARY = "replaced.json"


def write_data(folder: Path, pairs: Pairs, candidates: Candidates, scores: np.ndarray, summary: dict[str, Any]) -> None:
    """Write rows, texts, card and summary into a new ``folder``."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    train = {
        "query_id": [str(query) for query, _ in candidates],
        "document_ids": [list(map(str, row)) for _, row in candidates],
        "scores": scores.tolist(),
    }
    tables = {
        "train": Dataset.from_dict(train),
        "queries": _numbered(pairs.queries, "query_id", folder),
        "documents": _numbered(pairs.documents, "document_id", folder),
    }
    for name, table in tables.items():
        table.to_parquet(folder / f"{name}.parquet")
    configs = [{"config_name": name, "data_files": [{"split": "train", "path": f"{name}.parquet"}]} for name in tables]
    (folder / CARD).write_text(f"---\n{yaml.safe_dump({'configs': configs})}---\n", encoding="utf-8")
    write_record(folder / SUMMARY_FILE, summary)


def put_into_place(data: Path, output: Path, replace: bool) -> None:
    """Move the folder ``data`` to ``output``; with ``replace`` file by file, which leaves the user's files there."""
    if not replace:
        replace_folder(output, lambda scratch: os.replace(data, scratch))
        return
    output.mkdir(exist_ok=True)
    # Old rows with new texts could be trained on, so the rows go first and come last.
    remove_file(output / "train.parquet")
    if (output / CARD).exists():  # it may be edited, and says where the tables are, which does not change
        (data / CARD).unlink()
    for name in OWN_FILES:
        if (data / name).exists():
            replace_file(output / name, functools.partial(os.replace, data / name))


def _numbered(texts: Dataset, column: str, folder: Path) -> Dataset:
    """``texts`` with their row numbers as ids, on disk."""
    numbered = texts.map(
        lambda batch, rows: {column: list(map(str, rows))},
        batched=True,
        with_indices=True,
        cache_file_name=str(folder.parent / f"{column}.arrow"),
        load_from_cache_file=False,
        desc="Writing texts",
    )
    return numbered.select_columns([column, "text"])
