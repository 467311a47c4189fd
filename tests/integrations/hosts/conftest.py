import pytest


@pytest.fixture(autouse=True)
def _of_any_size(monkeypatch):
    """Tiny batches of a SparseEncoder on a CPU would be left to stock, which is faster there."""
    from tests.support.hosts import host_of

    if not isinstance(host_of("SparseEncoder"), str):
        from pylate_fastmaxsim.integrations.sparse_encoder import encoder

        monkeypatch.setattr(encoder, "FEW_TOKENS", 0)
