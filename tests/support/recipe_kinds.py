"""The kinds of models that recipes train in this environment, and a tiny recipe of each."""

from pathlib import Path

import pytest
import sentence_transformers

from tests.support.page_recipes import PAGES
from tests.support.tiny_recipe import LENGTHS, ONE_LAYER, tiny

# PyLate and the release of Sentence Transformers that has MultiVectorEncoder are not installed together.
LATE = "multi_vector" if hasattr(sentence_transformers, "MultiVectorEncoder") else "colbert"
KINDS = (LATE, "splade")  # of texts
TRAINED = (*KINDS, *PAGES)
MARKED = [pytest.param(kind, marks=() if kind == LATE else pytest.mark.e2e) for kind in TRAINED]


def tiny_of(kind: str, directory: Path, output: str = "out", **sections) -> dict:
    """As ``tiny``, of a kind of model. Only a ColBERT has dropout; regularizers of a SPLADE show in the loss."""
    recipe = tiny(directory, output, **sections)
    if kind == "colbert":
        return recipe
    own = {"max_seq_length": 24} if kind == "splade" else LENGTHS
    build = {"vocab_size": 600, "dropout": 0.0, **ONE_LAYER}
    recipe["model"] = {"kind": kind, "build": build, **own, **sections.get("model", {})}
    if kind == "splade":
        recipe["loss"] = {"regularizers": {"query_weight": 0.01, "document_weight": 0.02}, **sections.get("loss", {})}
    return recipe
