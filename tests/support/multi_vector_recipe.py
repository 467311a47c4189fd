"""A recipe of a tiny MultiVectorEncoder, made from scratch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.tiny_recipe import tiny

pytest.importorskip(
    "sentence_transformers.multi_vector_encoder", reason="no MultiVectorEncoder before Sentence Transformers 6"
)


def tiny_multi_vector(directory: Path, output: str = "out", rows: list[dict] | None = None, **sections) -> dict:
    """As ``tiny``, of Sentence Transformers' late interaction and without dropout, on other rows if they are given."""
    recipe = tiny(directory, output, **sections)
    build = {**recipe["model"]["build"], "dropout": 0.0}
    lengths = {"embedding_size": 8, "query_length": 8, "document_length": 24}
    recipe["model"] = {"kind": "multi_vector", "build": build, **lengths, **sections.get("model", {})}
    if rows is not None:
        file = directory / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        recipe["data"] = {"source": "files", "files": [str(file)]}
    return recipe
