import pytest


@pytest.fixture
def model(encoder):
    from tests.support.sparse_encoders import splade

    return splade(encoder("bert", masked_lm=True))


@pytest.fixture
def searches(monkeypatch) -> list[int]:
    """The numbers of documents that were searched exactly, search by search."""
    from pylate_fastmaxsim.integrations.sparse_encoder import search as module

    made, search = [], module.sparse_search

    def counted(queries, documents, k):
        documents = list(documents)
        made.append(sum(map(len, documents)))
        return search(queries, documents, k)

    monkeypatch.setattr(module, "sparse_search", counted)
    return made
