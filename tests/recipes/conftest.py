from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

# Of these kinds of model, in tests that need nothing of PyLate.
WITHOUT_PYLATE = ("multi_vector", "splade_recipes", "splade_evaluation", "splade_columns")

# Recipes need the extra "recipes".
try:
    for module in ("datasets", "matplotlib", "ranx", "rich"):
        import_module(module)
except ImportError:
    collect_ignore_glob = ["*"]
try:
    import_module("pylate")
except ImportError:  # Sentence Transformers 6 excludes it
    files = Path(__file__).parent.rglob("test_*.py")
    collect_ignore = [str(file) for file in files if not any(kind in file.name for kind in WITHOUT_PYLATE)]


@pytest.fixture(scope="session")
def teacher(tmp_path_factory, encoder) -> str:
    """A cross-encoder with random weights."""
    import torch
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    folder = str(tmp_path_factory.mktemp("teacher"))
    tokenizer = AutoTokenizer.from_pretrained(encoder("bert"))
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    config.num_labels = 1
    BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
