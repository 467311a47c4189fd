import pytest
import torch

from benchmarks.retrieval import sparse_data
from benchmarks.retrieval.sparse_baselines import CuSparse, Dense, ScatterAdd
from benchmarks.retrieval.sparse_search import agreement, exact
from pylate_fastmaxsim import reference
from tests.support.interpreter import interpreted  # noqa: F401


@pytest.mark.interpret
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("kind", "bound"), [(CuSparse, 1e-5), (ScatterAdd, 1e-5), (Dense, 1e-3)])
def test_baselines_find_the_same(kind, bound, monkeypatch):
    monkeypatch.setattr("benchmarks.retrieval.sparse_baselines.DOCUMENTS_PER_MATRIX", 10)  # a matrix for each chunk
    (whole,) = sparse_data.documents(70, torch.device("cpu"))
    documents = [whole.select(torch.arange(50)), whole.select(torch.arange(50, 70))]
    asked = sparse_data.queries(documents, 5)
    found, expected = kind(documents).search(asked, 20), exact(asked, documents, 20)
    assert agreement(expected, reference.sparse_top(asked, whole, 20), 20) == {"recall": 1, "exact": True}
    few = [each[:, :5] for each in expected]
    assert agreement(few, expected, 20) == {"recall": 0.25, "exact": False}
    torch.testing.assert_close(found[0].float(), expected[0], rtol=bound, atol=bound / 10)
    assert agreement(found, expected, 20)["recall"] > 0.99
