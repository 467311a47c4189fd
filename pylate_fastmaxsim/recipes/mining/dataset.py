"""Write mined distillation data, in the layout of ``lightonai/ms-marco-en-bge``."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from datasets import Dataset

from pylate_fastmaxsim.recipes.data.mined import SUMMARY_FILE
from pylate_fastmaxsim.recipes.mining.pairs import Pairs
from pylate_fastmaxsim.recipes.mining.teacher import Candidates

logger = logging.getLogger(__name__)

CARD = "README.md"
# The summary of data that are being replaced, in the folder of what is unfinished.
OLD_SUMMARY = "replaced.json"


def write_data(folder: Path, pairs: Pairs, candidates: Candidates, scores: np.ndarray, summary: dict[str, Any]) -> None:
    """Rows of queries, documents and scores, the texts, and last the summary, as ``folder``."""
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
    (folder / SUMMARY_FILE).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def put_into_place(data: Path, output: Path, unfinished: Path) -> None:
    """Make the folder ``data`` the folder ``output``; of data mined there before only mining's own files are replaced.

    Interrupted, it leaves the earlier data, the new ones, or ``OLD_SUMMARY`` in ``unfinished`` and none in ``output``.
    """
    summary, old_summary = output / SUMMARY_FILE, unfinished / OLD_SUMMARY
    if not summary.exists() and not old_summary.exists():
        os.replace(data, output)  # which fails where another folder holds something
        return
    output.mkdir(exist_ok=True)
    if summary.exists():
        os.replace(summary, old_summary)
    # Rows without their texts cannot be trained on, nor texts without rows, but old rows with new texts can.
    (output / "train.parquet").unlink(missing_ok=True)
    card = output / CARD
    if card.exists():  # it says where the tables are, which does not change, and perhaps more in the user's own words
        if card.read_bytes() != (data / CARD).read_bytes():
            logger.warning("%s was edited since mining wrote it, and stays as it is.", card)
        (data / CARD).unlink()
    for name in ("queries.parquet", "documents.parquet", "train.parquet", CARD, SUMMARY_FILE):
        if (data / name).exists():
            os.replace(data / name, output / name)


def _numbered(texts: Dataset, column: str, folder: Path) -> Dataset:
    """``texts`` with their numbers as ids, on disk as well."""
    numbered = texts.map(
        lambda batch, rows: {column: list(map(str, rows))},
        batched=True,
        with_indices=True,
        cache_file_name=str(folder.parent / f"{column}.arrow"),
        load_from_cache_file=False,
        desc="Writing texts",
    )
    return numbered.select_columns([column, "text"])
