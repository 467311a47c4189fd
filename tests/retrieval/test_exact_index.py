"""An index goes where PyLate takes its own, and finds what PyLate finds by scoring every document."""

import os

import numpy as np
import pytest
import torch
from pylate import rank, retrieve

from pylate_fastmaxsim import SparseBatch, SparseIndex
from pylate_fastmaxsim.files.lock import writing
from pylate_fastmaxsim.indexes import Exact, exact
from pylate_fastmaxsim.retrieval import corpus, search
from pylate_fastmaxsim.retrieval.corpus import write_corpus
from tests.support.case_tables import case_table
from tests.support.corpora import FORMATS, codec, grouped, unit_documents
from tests.support.power_cut import states, written

# All with tokens, since PyLate scores none without.
DOCUMENTS = [each for each in unit_documents(70, seed=2) if len(each)]
IDS = [f"d{number}" for number in range(len(DOCUMENTS))]
# Of numbers that each format has, so that rounding changes no query.
QUERIES = [
    torch.randint(-1, 2, (size, 16), generator=torch.Generator().manual_seed(size)).float() for size in (1, 4, 7)
]
SUBSETS = [IDS[9:14], [IDS[30]], [each for each in IDS[15:45] if each != "d20"]]


def by_pylate(index, subsets, k):
    """Each document by itself, since ``rerank`` pads documents with zeros that it scores."""
    found = []
    for query, ids in zip(QUERIES, subsets, strict=True):
        vectors = index.get_documents_embeddings([ids])[0]
        scored = [rank.rerank([[each]], [query], [[vector]])[0][0] for each, vector in zip(ids, vectors, strict=True)]
        found.append(sorted(scored, key=lambda each: -each["score"])[:k])
    return found


def assert_same(found, expected):
    assert [[each["id"] for each in row] for row in found] == [[each["id"] for each in row] for row in expected]
    scores = [[each["score"] for row in rows for each in row] for rows in (found, expected)]
    assert scores[0] == pytest.approx(scores[1], rel=1e-4, abs=1e-5)


def assert_finds(index, held, format):
    """As a new index of the same documents does, and as PyLate."""
    assert index.ids == [*held] and len(index) == len(held)
    retriever, ids = retrieve.ColBERT(index=index), [[*held]] * len(QUERIES)
    assert_same(retriever.retrieve(QUERIES, k=10), by_pylate(index, ids, 10))
    assert_same(retriever.retrieve(QUERIES, k=99, subset=SUBSETS), by_pylate(index, SUBSETS, 99))
    assert_same(index(QUERIES, k=4, subset=SUBSETS[2]), by_pylate(index, [SUBSETS[2]] * len(QUERIES), 4))
    new = Exact(format=format or "bfloat16", device="cpu").add_documents([*held], [*held.values()])
    for one, other in zip(*(each.get_documents_embeddings([[*held]])[0] for each in (index, new)), strict=True):
        assert one.dtype == np.float32 and np.array_equal(one, other)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("place", "device"),
    [
        *((place, "cpu") for place in ("memory", "disk", "device")),
        ("device", ["cpu", "cpu", "cpu"]),
        *(pytest.param("device", each, marks=pytest.mark.cuda) for each in ("cuda", ["cuda:0", "cuda:0"])),
    ],
)
def test_pylate_finds_the_same_by_scoring_everything(place, device, format, tmp_path, monkeypatch):
    monkeypatch.setattr(search, "TOKENS_PER_BATCH", 40)
    monkeypatch.setattr(corpus.Corpus.batches, "__defaults__", ("cpu", 40, 0, None))
    monkeypatch.setattr(exact, "TOKENS_HELD", 90)
    monkeypatch.setattr(exact, "DOCUMENTS_AT_ONCE", 3)
    folder = None if place == "memory" else tmp_path

    def opened(**options):
        index = Exact(folder, device=device, **options)
        if place == "device":
            index._held = []  # which a CPU does not need
        return index

    index = opened(format=FORMATS[format] or "bfloat16")
    held = dict(zip(IDS[:30], DOCUMENTS[:30], strict=True))
    assert index.add_documents(IDS[:30], DOCUMENTS[:30], batch_size=7) is index
    with pytest.raises(ValueError, match="the id 'd31' is not in the index"):
        index(QUERIES, subset=["d1", "d31"])
    assert len(index(QUERIES)[0]) == 10
    more = (each.numpy() for each in DOCUMENTS[30:50])
    index.add_documents(IDS[30:50], more, batch_size=6)
    held |= dict(zip(IDS[30:50], DOCUMENTS[30:50], strict=True))
    assert_finds(index, held, FORMATS[format])
    index.update_documents(["d3", 7, "d12"], DOCUMENTS[50:53]).remove_documents(["d20", "d0"]).remove_documents("d49")
    for gone in ("d3", "d12", "d20", "d0", "d49"):
        del held[gone]
    held |= dict(zip(("d3", 7, "d12"), DOCUMENTS[50:53], strict=True))
    for each in (index, index if place == "memory" else opened()):
        assert_finds(each, held, FORMATS[format])
    held |= {"d20": DOCUMENTS[53]}  # again
    assert_finds(each.add_documents("d20", DOCUMENTS[53]), held, FORMATS[format])
    assert index(QUERIES, subset=[]) == index(QUERIES, subset=[[], [], []]) == [[], [], []]
    assert each.remove_documents(each.ids)(QUERIES) == [[], [], []]


NEW = [np.full((2, 16), number, np.float32) for number in range(1, 6)]


@pytest.mark.parametrize(
    ("change", "after"),
    [
        (lambda index: index.update_documents([*"cde"], NEW[2:], batch_size=1), ["ab", "abc", "abcd", "abcde"]),
        (lambda index: index.update_documents([*"ac"], [NEW[0], NEW[2]]), ["ab", "bac"]),
        (lambda index: index.remove_documents("a") if "a" in index.ids else None, ["ab", "b"]),
        (lambda index: Exact(index._storage.folder.parent, index._storage.folder.name, override=True), ["ab", ""]),
    ],
    ids=["add", "update", "remove", "override"],
)
def test_a_kill_leaves_the_last_finished_batch(change, after, tmp_path, monkeypatch):
    monkeypatch.setattr(exact, "DOCUMENTS_AT_ONCE", 1)
    (tmp_path / "root").mkdir()
    opened = lambda folder: Exact(folder.parent, folder.name, device="cpu")  # noqa: E731
    index = opened(tmp_path / "root").add_documents([*"ab"], NEW[:2])
    seen = set()
    for number, (state, left) in enumerate(states(tmp_path / "root", lambda: change(index), cuts=3)):
        folder = written(left, tmp_path / str(number))
        found = opened(folder)
        seen.add("".join(found.ids))
        if found.ids:
            vectors = found.get_documents_embeddings([found.ids])[0]
            assert [each[0, 0] for each in vectors] == ["_abcde".index(each) for each in found.ids]
        assert state != "end" or "".join(found.ids) == after[-1]
        change(found)
        assert "".join(opened(folder).ids) in (after[-1], "bac" if "a" in after[-1] else "")  # updated twice
    assert seen == {*after}


# A call of an index of the documents a and b, and what is said.
@case_table(r"""
call | error | sentence
add_documents(["c", "c"], NEW[:2]) | ValueError | add_documents: the id 'c' is given twice.
add_documents("a", NEW[0]) | ValueError | the id 'a' is in the index; update_documents replac
add_documents(["c"], NEW[:2]) | ValueError | must be of equal length, got 1 and 2
add_documents([*"cd"], iter(NEW[:1])) | ValueError | must be of equal length, got 2 and 1
add_documents("c", NEW[0][:, :4]) | ValueError | must have the d = 16 of the index, got 4
add_documents([*"cd"], [NEW[0], NEW[1][:, :4]]) | ValueError | must have the d = 16 of the index, got 4
add_documents("c", None) | TypeError | must be a list of \[L, d\], got NoneType
add_documents("c", ["text"]) | TypeError | each of documents_embeddings must be .* got str
add_documents([1.5], NEW[:1]) | TypeError | an id must be an integer or a string, got 1.5
add_documents("c", NEW[:1], batch_size=0) | ValueError | batch_size must be at least 1
remove_documents(["b", "c"]) | ValueError | remove_documents: the id 'c' is not in the index
remove_documents(["b", "b"]) | ValueError | remove_documents: the id 'b' is given twice
get_documents_embeddings([["c"]]) | ValueError | embeddings: the id 'c' is not in the index
__call__(NEW[:1], subset=["a", "c"]) | ValueError | the id 'c' is not in the index
__call__(NEW[:1], subset=[["a"], ["b"]]) | ValueError | ids for each of 1 queries, got 2
__call__(NEW[0][:, :4]) | ValueError | queries_embeddings must have the d = 16 of the index, got 4
__call__(NEW[:1], k=0) | ValueError | k must be at least 1, got 0
__class__(device="cpu")(NEW[:1]) | ValueError | the index is empty; add documents first
__class__(format="int4") | ValueError | format must be one of bfloat16, .* ResidualCodec, got 'int4'
""")
@pytest.mark.parametrize("in_memory", [True, False])
def test_what_cannot_be_done_is_said_and_changes_nothing(call, error, sentence, in_memory, tmp_path, monkeypatch):
    monkeypatch.setattr(exact, "DOCUMENTS_AT_ONCE", 1)
    index = Exact(None if in_memory else tmp_path, device="cpu").add_documents([*"ab"], NEW[:2])
    before = index(NEW[:2])
    with pytest.raises((TypeError, ValueError), match=f"^Exact[^\n]*{sentence}[^\n]*$") as raised:
        eval(f"index.{call}")
    assert raised.typename == error
    assert index.ids == [*"ab"] and index(NEW[:2]) == before
    vectors = index.add_documents("e", NEW[4]).get_documents_embeddings([[*"abe"]])[0]
    assert all(map(np.array_equal, vectors, (NEW[0], NEW[1], NEW[4])))


def test_folders_of_something_else_are_refused_and_stay(tmp_path):
    SparseIndex.build([SparseBatch.from_lists([[(0, 1.0)]], 2)], folder=tmp_path / "sparse")
    write_corpus(tmp_path / "corpus", grouped(DOCUMENTS, 9))
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "values.bin").write_text("of somebody else")
    index = Exact(tmp_path, "index", format="int8", device="cpu").add_documents([*"ab"], NEW[:2])
    other = Exact(tmp_path, "index", device="cpu").add_documents("c", NEW[2])
    before = {file: file.read_bytes() for file in tmp_path.rglob("*.*") if file.is_file()}
    for name, options, sentence in (
        ("sparse", {}, "holds no index, since it has no corpus.json; choose another folder"),
        ("notes", {"override": True}, "holds no index, since it has no corpus.json"),
        ("corpus", {"override": True}, "holds token embeddings without ids; choose another folder"),
        ("index", {"format": "fp8"}, "holds documents of the format 'int8', which cannot go on with fp8"),
        ("index", {"format": codec()}, "'int8', which cannot go on with a codec of 2 bits and d = 16"),
    ):
        with pytest.raises(ValueError, match=f"^Exact: {tmp_path / name}.*{sentence}"):
            Exact(tmp_path, name, **options)
    with pytest.raises(ValueError, match="write_corpus: .* is an index; add documents to it with pylate_fast"):
        write_corpus(tmp_path / "index", lambda held: grouped(DOCUMENTS, 9), format="int8")
    with writing("test", tmp_path / "index"), pytest.raises(ValueError, match="is being written by another process"):
        index.remove_documents("a")
    assert {file: file.read_bytes() for file in tmp_path.rglob("*.*") if file.is_file()} == before
    # What another process has added is there before anything else is.
    assert index.remove_documents("c").ids == [*"ab"] and other.add_documents("c", NEW[3]).ids == [*"abc"]
    Exact(tmp_path, "index", override=True)
    with pytest.raises(ValueError, match="was begun anew by another process; open it again"):
        index.remove_documents("a")
    assert len(os.listdir(tmp_path / "index")) == 2
    assert Exact(tmp_path, "index", format="fp8").remove_documents([]).ids == []
