"""A sparse index and a stream of sparse batches return what sorting all of SciPy's scores returns."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pylate_fastmaxsim import SparseBatch, SparseIndex, reference, sparse_search
from pylate_fastmaxsim.kernels.sparse import postings
from pylate_fastmaxsim.retrieval.sparse import search as module
from tests.support.sparse_vectors import assert_same, scipy_products, sorted_scores, sparse_vectors


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(postings, "DOCUMENTS_PER_BLOCK", 8)


def in_batches(documents: SparseBatch, sizes: list[int]):
    begin = 0
    for size in [*sizes, len(documents)]:
        end = min(len(documents), begin + size)
        yield documents.select(torch.arange(begin, end))
        begin = end


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(0, 40),
    vocabulary=st.sampled_from([1, 4, 30, 1 << 16, (1 << 16) + 1, 1 << 31]),
    sizes=st.lists(st.integers(0, 20), max_size=4),
    k=st.sampled_from([1, 2, 7, 60]),
    queries=st.integers(0, 5),
    every=st.sampled_from([1, 3]),
    dtypes=st.tuples(*[st.sampled_from([torch.float16, torch.float32])] * 2),
    at_once=st.sampled_from([1, 20, 1 << 22]),
    data=st.data(),
)
def test_equal_to_sorting_all(count, vocabulary, sizes, k, queries, every, dtypes, at_once, data, tmp_path_factory):
    asked = sparse_vectors(queries, vocabulary, seed=queries, dtype=dtypes[0])
    documents = sparse_vectors(count, vocabulary, seed=count, every=every, dtype=dtypes[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "ENTRIES_HELD", at_once)
        expected = sorted_scores(asked, documents, k)
        assert_same(reference.sparse_top(asked, documents, k), expected)
        expected = [each[:, :count] for each in expected]
        assert_same(sparse_search(asked, in_batches(documents, sizes), k), expected)
        index = SparseIndex.build(in_batches(documents, sizes))
        assert len(index) == count
        for _ in range(2):  # a CPU has documents sorted by term from the second search on
            assert_same(index.search(asked, k), expected)

        removed: set[int] = set()
        names, fresh = [*range(0, -count, -1)], map(str, itertools.count())  # by position, and those of others
        if with_ids := data.draw(st.booleans()):
            index = SparseIndex.build(in_batches(documents, sizes), ids=names)
        for _ in range(data.draw(st.integers(0, 4))):
            left = sorted({*range(len(documents))} - removed)
            gone = data.draw(st.lists(st.sampled_from(left), unique=True)) if left else []
            more = sparse_vectors(data.draw(st.integers(0, 20)), vocabulary, seed=len(index), dtype=dtypes[1])
            new = [*itertools.islice(fresh, len(more))]
            if with_ids and data.draw(st.booleans()):
                gone = gone[: len(new)]
                new[: len(gone)] = [names[at] for at in gone]
                index.update(in_batches(more, sizes), new)
            else:
                index.add(in_batches(more, sizes), new if with_ids else None)
                index.remove(**{"ids": [names[at] for at in gone]} if with_ids else {"positions": gone})
            documents, names = SparseBatch.concatenate([documents, more]), names + new
            removed |= {*gone}
            if data.draw(st.booleans()):
                kept = torch.tensor(sorted({*range(len(documents))} - removed), dtype=torch.int64)
                assert torch.equal(index.compact(), kept)
                documents, names, removed = documents.select(kept), [names[at] for at in kept], set()
            if data.draw(st.booleans()):
                folder = tmp_path_factory.mktemp("index")
                index.save(folder)
                index = SparseIndex.load(folder)
            assert len(index) == len(documents)
            expected = sorted_scores(asked, documents, k, removed)
            found = index.search(asked, k)
            assert_same(found, [each[:, : len(documents)] for each in expected])
            left = torch.tensor(sorted({*range(len(documents))} - removed), dtype=torch.int64).flip(0)
            mine, theirs = index.vectors(left), documents.select(left)
            for part in ("offsets", "terms", "weights"):
                assert getattr(mine, part).tolist() == getattr(theirs, part).tolist() and mine.dtype == theirs.dtype
            if with_ids:
                assert index.ids == [names[at] for at in left.flip(0)]
                assert index.ids_of(found[1]) == [[names[at] for at in row if at >= 0] for row in found[1].tolist()]


def test_sums_keep_the_order_of_terms():
    """Of these weights every other order of adding gives other bits."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-30, 30, (40, 60), generator=generator)
    documents = SparseBatch.from_torch(torch.rand(40, 60, generator=generator) * 2.0**exponents)
    queries = documents.select(torch.arange(10))
    found = SparseIndex.build([documents]).search(queries, 40)
    assert_same(found, sorted_scores(queries, documents, 40))
    assert_same(reference.sparse_top(queries, documents, 40), found)
    exact = reference.sparse_scores(queries, documents)
    assert exact.tolist() == scipy_products(queries, documents).tolist()


def test_scores_that_round_to_zero_and_to_infinity_are_returned(monkeypatch):
    monkeypatch.setattr(module, "ENTRIES_HELD", 1)  # results of several stretches, some of them incomplete
    documents = SparseBatch.from_lists([[(1, 1.0)], [(0, 1e-30)], [(0, 3e38)], [(0, 1e38)]] * 5, vocabulary=2)
    queries = SparseBatch.from_lists([[(0, 1e-30)], [(0, 3e38)]], vocabulary=2)
    expected = sorted_scores(queries, documents, 20)
    assert_same(reference.sparse_top(queries, documents, 20), expected)
    assert expected[0][0, 10] == 0 and expected[1][0, 10] == 1 and expected[0][1, 9].isinf()
    assert_same(SparseIndex.build([documents]).search(queries, 30), expected)
    assert_same(sparse_search(queries, [documents], 30), expected)
    for k in (1, 3, 12):
        assert_same(sparse_search(queries, [documents], k), [each[:, :k] for each in expected])


@pytest.mark.parametrize("k", [10**7, 2**60])
def test_more_results_than_documents_take_no_memory(k):
    documents = SparseBatch.from_lists([[(0, 1.0)], [(1, 2.0)], []], vocabulary=2)
    queries = SparseBatch.from_lists([[(0, 3.0)]] * 100, vocabulary=2)
    parts = in_batches(documents, [1, 1])
    for found in (SparseIndex.build([documents]).search(queries, k), sparse_search(queries, parts, k)):
        assert [each[0].tolist() for each in found] == [[3, 0, 0], [0, -1, -1]]


WHOLE, HALF, OTHER = (sparse_vectors(20, *each) for each in ((30, 0), (30, 0), (31, 0)))
HALF = SparseBatch(HALF.offsets, HALF.terms, HALF.weights.half(), 30)
ASKED = [
    (("text", 1), TypeError, "queries must be a SparseBatch, a tensor .* got str.$"),
    (([], 1), TypeError, "queries must be a SparseBatch, .* got an empty list.$"),
    (([torch.ones(30), torch.ones(31)], 1), ValueError, r"each of queries must be .vocabulary., of one .*30,.*31,"),
    ((torch.ones(2, 3, 4), 1), ValueError, r"queries must be \[N, vocabulary\], got shape \(2, 3, 4\)"),
    ((WHOLE, 0), ValueError, "k must be at least 1, got 0.$"),
    ((OTHER, 1), ValueError, ".* must have the vocabulary"),
]


@pytest.mark.parametrize(
    ("method", "arguments", "error", "sentence"),
    [
        *(("search", *each) for each in ASKED),
        ("add", (3,), TypeError, "batches must be batches of documents, as a list of SparseBatch, got int"),
        ("add", (["text"],), TypeError, r"batches\[0\] must be a SparseBatch, .* got str."),
        ("add", ([OTHER],), ValueError, "batches must have the vocabulary 30, got 31."),
        ("add", ([WHOLE],), ValueError, "float32 weights cannot follow float16 ones"),
        ("build", ([],), ValueError, "there must be at least one batch"),
        ("to", ("meta",), ValueError, "the device must be a CPU or a CUDA GPU, got meta."),
        ("remove", ([2, 20],), ValueError, "positions must be from 0 to 19, got 20"),
        ("remove", ([-1],), ValueError, "positions must be from 0 to 19, got -1"),
        ("remove", ([2, 17],), ValueError, "position 17 is removed already"),
        ("remove", ([2, 2],), ValueError, "position 2 is given twice"),
        ("remove", (torch.ones(20, dtype=torch.bool),), TypeError, r"positions must be integers \[n\], got torch.bool"),
        ("remove", ([1.5],), TypeError, r"positions must be integers \[n\], got torch.float32"),
        ("remove", (3,), TypeError, r"positions must be integers, a list or a tensor \[n\], got 3"),
        ("remove", (), TypeError, "documents must be given by positions or by ids"),
        ("remove of ids", ([2], [2]), TypeError, "documents must be given by positions or by ids"),
        ("remove of ids", (None, [2, "a"]), ValueError, "the id 'a' is not in the index"),
        ("remove of ids", (None, [2, 3]), ValueError, "the id 3 is not in the index"),
        ("vectors of ids", (None, "a"), ValueError, "the id 'a' is not in the index"),
        ("add of ids", ([HALF],), ValueError, "ids must be given, since the documents of the index have ids"),
        ("add of ids", ([HALF], ["a"]), ValueError, "ids must be as many as documents, got 1 for 20"),
        ("add of ids", ([HALF, OTHER], range(30, 70)), ValueError, "batches must have the vocabulary 30, got 31"),
        (
            "add of ids",
            ([HALF], [*range(30, 49), 5]),
            ValueError,
            "the id 5 is in the index; SparseIndex.update replaces",
        ),
        ("add of ids", ([HALF], [1.5] * 20), TypeError, "an id must be an integer or a string, got 1.5"),
        ("update of ids", ([HALF], "a"), ValueError, "ids must be as many as documents, got 1 for 20"),
        ("vectors", ([2, 17],), ValueError, "position 17 is removed already"),
        ("add", ([HALF], range(20)), ValueError, r"documents of the index have no ids; SparseIndex.build\(index"),
        ("update", ([HALF], range(20)), ValueError, "documents of the index have no ids"),
        ("ids_of", (torch.tensor([[2]]),), ValueError, "documents of the index have no ids"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(method, arguments, error, sentence):
    method, _, of_ids = method.partition(" of ")
    index = SparseIndex.build([HALF], ids=range(20) if of_ids else None)
    index.remove(torch.tensor([3, 17]))
    with pytest.raises(error, match=f"^SparseIndex.{method}: {sentence}"):
        getattr(index, method)(*arguments)
    assert index.ids == ([each for each in range(20) if each not in (3, 17)] if of_ids else None)
    assert_same(index.search(WHOLE, 20), sorted_scores(WHOLE, HALF, 20, {3, 17}))


def test_what_a_stream_cannot_be_asked_is_refused():
    for (queries, k), error, sentence in ASKED:
        with pytest.raises(error, match=f"^sparse_search: {sentence}"):
            sparse_search(queries, [WHOLE], k)


@pytest.mark.parametrize(
    "form",
    [
        lambda batch: batch,
        lambda batch: torch.from_numpy(batch.to_scipy().toarray()).to_sparse(),
        lambda batch: torch.from_numpy(batch.to_scipy().toarray()).to_sparse_csr(),
        lambda batch: [*torch.from_numpy(batch.to_scipy().toarray()).to_sparse()],
        lambda batch: batch.to_scipy(),
    ],
    ids=["SparseBatch", "COO", "CSR", "list", "SciPy"],
)
def test_vectors_are_taken_in_the_form_that_a_model_returns(form):
    documents, queries = sparse_vectors(20, 30, seed=0), sparse_vectors(5, 30, seed=1)
    expected = sorted_scores(queries, documents, 7)
    index = SparseIndex.build(form(documents))
    assert repr(index) == "SparseIndex(20 documents, vocabulary 30, float32, on cpu)"
    assert_same(index.search(form(queries), 7), expected)
    assert_same(sparse_search(form(queries), iter([form(documents)]), 7), expected)
    index.add(form(documents))
    index.remove([20])
    assert repr(index).startswith("SparseIndex(40 documents, of which 1 are removed,")


def test_float16_documents_widen_behind_float32_ones():
    half, single = sparse_vectors(9, 30, seed=0, dtype=torch.float16), sparse_vectors(9, 30, seed=1)
    assert SparseIndex.build([half]).dtype == torch.float16
    index = SparseIndex.build([single, half])
    assert index.dtype == torch.float32
    both = SparseBatch.concatenate([single, half])
    assert_same(index.search(both, 18), sorted_scores(both, both, 18))
    assert_same(sparse_search(both, [single, half], 18), sorted_scores(both, both, 18))


def test_the_default_device_does_not_matter(tmp_path):
    documents = sparse_vectors(20, 30, seed=0)
    expected = sorted_scores(documents, documents, 9, {3})
    with torch.device("meta"):
        index = SparseIndex.build([documents])
        index.remove([3])
        index.save(tmp_path)
        found = [SparseIndex.load(tmp_path).search(documents, 9), sparse_search(documents, [documents], 9)]
    assert_same(found[0], expected)
    assert_same(found[1], sorted_scores(documents, documents, 9))
