"""Write mined distillation data, in the layout of ``lightonai/ms-marco-en-bge``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from datasets import Dataset

from pylate_fastmaxsim.recipes.mined import SUMMARY_FILE
from pylate_fastmaxsim.recipes.mining_scores import Candidates
from pylate_fastmaxsim.recipes.pairs import Pairs


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
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': configs})}---\n", encoding="utf-8")
    (folder / SUMMARY_FILE).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


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
