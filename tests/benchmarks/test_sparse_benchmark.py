import pytest
import torch

from benchmarks.retrieval import sparse_data
from benchmarks.retrieval.sparse_baselines import CuSparse, ScatterAdd
from benchmarks.retrieval.sparse_search import agreement, exact
from pylate_fastmaxsim import SparseBatch, reference
from tests.support.interpreter import interpreted  # noqa: F401

CPU = torch.device("cpu")


def collection(count: int = 70) -> list[SparseBatch]:
    (chunk,) = sparse_data.documents(count, CPU)
    return [chunk.select(torch.arange(50)), chunk.select(torch.arange(50, count))]


def test_the_exact_result_is_that_of_the_whole():
    documents = collection()
    asked = sparse_data.queries(documents, 6)
    whole = reference.sparse_top(asked, SparseBatch.concatenate(documents), 80)
    assert agreement(exact(asked, documents, 80), whole) == {"recall": 1, "exact": True}
    wrong = whole[0], whole[1].roll(1, dims=0)
    assert agreement(wrong, tuple(each[:2] for each in whole))["exact"] is False
    assert agreement((whole[0][:, :10], whole[1][:, 10:20]), whole)["recall"] == 0


@pytest.mark.interpret
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("kind", [CuSparse, ScatterAdd])
def test_baselines_find_the_same(kind, monkeypatch):
    monkeypatch.setattr("benchmarks.retrieval.sparse_baselines.DOCUMENTS_PER_MATRIX", 10)  # a matrix for each chunk
    documents = collection()
    asked = sparse_data.queries(documents, 5)
    found, expected = kind(documents).search(asked, 20), exact(asked, documents, 20)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-6)
    assert agreement(found, expected)["recall"] > 0.99
