"""An index on a GPU goes through the same life as on a CPU; without one, on the emulated kernels of a GPU."""

from functools import partial

import pytest
import torch

from pylate_fastmaxsim import SparseBatch, SparseIndex, sparse_search
from pylate_fastmaxsim.kernels.sparse import postings
from pylate_fastmaxsim.retrieval.sparse import documents as sparse_documents
from pylate_fastmaxsim.retrieval.sparse import search as module
from tests.support.cuda_emulator import emulated_engine
from tests.support.sparse_vectors import assert_same, sorted_scores, sparse_vectors

pytest.importorskip("triton")

from pylate_fastmaxsim.kernels.sparse import launch  # noqa: E402

VOCABULARY = 30
# Small, so that a thousand documents are several blocks.
DOCUMENTS, THREADS = 256, 64


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    return emulated_engine(tmp_path_factory.mktemp("emulated"), DOCUMENTS, THREADS)


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request, monkeypatch):
    if request.param == "cuda":
        return torch.device("cuda", 0)
    engine = request.getfixturevalue("emulated")
    for place in (postings, launch):
        monkeypatch.setattr(place, "DOCUMENTS_PER_BLOCK", DOCUMENTS)
    for place in (sparse_documents, module):
        monkeypatch.setattr(place, "searchable", partial(launch.DeviceBlocks, engine=engine))
    return torch.device("cpu")


def test_an_index_is_built_changed_saved_and_loaded(device, tmp_path):
    size = postings.DOCUMENTS_PER_BLOCK
    documents = sparse_vectors(2 * size + size // 2, VOCABULARY, seed=0)
    queries = sparse_vectors(3, VOCABULARY, seed=1)
    removed: set[int] = set()

    def check(index: SparseIndex) -> None:
        assert len(index) == len(documents)
        for k in (1, 40):
            found = index.search(queries.to(index.device), k)
            assert {each.device for each in found} == {index.device}
            assert_same(found, sorted_scores(queries, documents, k, removed))

    def batches(held: int):
        return (documents.select(part).to(device) for part in torch.arange(held, len(documents)).split(size - 7))

    check(SparseIndex.build(batches, folder=tmp_path / "built", device=device))
    index = SparseIndex.build(batches(0))
    assert index.device == device
    check(index)
    removed.update(range(0, len(documents), 5))
    index.remove(sorted(removed))
    check(index)
    index.add([documents])
    documents = SparseBatch.concatenate([documents, documents])
    check(index)
    removed.add(len(documents) - 1)
    index.remove([len(documents) - 1])
    index.save(tmp_path / "saved")
    check(index)
    kept = index.compact()
    assert_same(index.search(queries.to(device), 40), sorted_scores(queries, documents.select(kept), 40))
    index = SparseIndex.load(tmp_path / "saved", device=device)
    loaded = SparseIndex.load(tmp_path / "saved", device=device)
    check(loaded)
    check(SparseIndex.load(tmp_path / "saved").to(device))
    check(loaded.to("cpu"))
    # The entries for search on a device, and those to save.
    assert loaded.nbytes == index.nbytes > 1.2 * documents.nbytes
    loaded.add([documents])
    documents = SparseBatch.concatenate([documents, documents])
    check(loaded)
    loaded.save(tmp_path / "saved")
    check(SparseIndex.load(tmp_path / "saved"))


def test_a_stream_is_searched_in_stretches(device, monkeypatch):
    size = postings.DOCUMENTS_PER_BLOCK
    documents = sparse_vectors(4 * size + 3, VOCABULARY, seed=0)
    queries = sparse_vectors(6, VOCABULARY, seed=1)
    monkeypatch.setattr(module, "ENTRIES_HELD", len(documents.terms) // 2)
    for k in (1, 40):
        batches = (documents.select(part).to(device) for part in torch.arange(len(documents)).split(size + 5))
        assert_same(sparse_search(queries.to(device), batches, k), sorted_scores(queries, documents, k))
