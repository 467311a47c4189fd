from importlib.util import find_spec

import pytest


@pytest.fixture(autouse=True)
def _of_any_size(monkeypatch):
    """Tiny batches of a SparseEncoder on a CPU would be left to stock, which is faster there."""
    if find_spec("sentence_transformers"):
        monkeypatch.setattr("pylate_fastmaxsim.integrations.sparse_encoder.encoder.FEW_TOKENS", 0)
