"""The kinds of models that recipes train in this environment, and a tiny recipe of each."""

from pathlib import Path

import sentence_transformers

from tests.support.page_recipes import PAGES
from tests.support.splade_recipe import tiny_splade
from tests.support.tiny_recipe import tiny

# PyLate and the release of Sentence Transformers that has MultiVectorEncoder are not installed together.
LATE = "multi_vector" if hasattr(sentence_transformers, "MultiVectorEncoder") else "colbert"
KINDS = (LATE, "splade")  # of texts
TRAINED = (*KINDS, *PAGES)


def tiny_of(kind: str, directory: Path, *arguments: str, **options) -> dict:
    """As ``tiny``, of a kind of model."""
    if kind == "multi_vector":
        from tests.support.multi_vector_recipe import tiny_multi_vector

        return tiny_multi_vector(directory, *arguments, **options)
    return {"colbert": tiny, "splade": tiny_splade}[kind](directory, *arguments, **options)
