"""A recipe of a tiny SPLADE, made from scratch."""

from pathlib import Path

from tests.support.tiny_recipe import ONE_LAYER, tiny


def tiny_splade(directory: Path, output: str = "out", **sections) -> dict:
    """As ``tiny``, of a ModernBERT with the head of a masked language model and regularizers that show in the loss."""
    recipe = tiny(directory, output, **sections)
    build = {"vocab_size": 600, "dropout": 0.0, **ONE_LAYER}
    recipe["model"] = {"kind": "splade", "build": build, "max_seq_length": 24, **sections.get("model", {})}
    regularizers = {"query_weight": 0.01, "document_weight": 0.02}
    recipe["loss"] = {"regularizers": regularizers, **sections.get("loss", {})}
    return recipe


def splade_over(directory: Path, name: str, **sections) -> dict:
    """The same of the masked language model or SparseEncoder of this name."""
    recipe = tiny_splade(directory, **sections)
    del recipe["model"]["build"]
    recipe["model"]["name_or_path"] = name
    return recipe
