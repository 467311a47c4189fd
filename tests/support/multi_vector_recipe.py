"""A recipe of a tiny MultiVectorEncoder, made from scratch."""

from pathlib import Path

import pytest

from tests.support.tiny_recipe import tiny

pytest.importorskip(
    "sentence_transformers.multi_vector_encoder", reason="no MultiVectorEncoder before Sentence Transformers 6"
)


def tiny_multi_vector(directory: Path, output: str = "out", **sections) -> dict:
    """As ``tiny``, of Sentence Transformers' late interaction and without dropout."""
    recipe = tiny(directory, output, **sections)
    build = {**recipe["model"]["build"], "dropout": 0.0}
    lengths = {"embedding_size": 8, "query_length": 8, "document_length": 24}
    recipe["model"] = {"kind": "multi_vector", "build": build, **lengths, **sections.get("model", {})}
    return recipe
