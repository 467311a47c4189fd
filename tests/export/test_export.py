"""Exports of each kind of folder to each target: all documents with their ids, also after a kill, and what is refused."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("pyarrow")

from pyarrow.dataset import dataset
from pyarrow.parquet import read_table

from pylate_fastmaxsim import TokenBatch, maxsim, read_plaid
from pylate_fastmaxsim.export import parquet, qdrant
from pylate_fastmaxsim.export.run import export
from pylate_fastmaxsim.indexes import Exact
from pylate_fastmaxsim.retrieval import plaid_writer
from pylate_fastmaxsim.retrieval.corpus import write_corpus
from tests.support.case_tables import case_table
from tests.support.command_line import fastmaxsim
from tests.support.corpora import vectors
from tests.support.power_cut import states, written
from tests.support.stored import COUNT, KINDS, shrink

Found = dict[str | int, list]  # what is stored of each document, by its id
NEEDS_QDRANT = "needs qdrant-client, the extra [qdrant]"


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Have few documents be many batches, groups, files, chunks and requests."""
    shrink(monkeypatch)
    for module, sizes in (
        (parquet, {"TOKENS": 7, "DOCUMENTS": 3, "GROUPS": 2}),
        (plaid_writer, {"TOKENS_PER_BATCH": 7, "TOKENS_PER_CHUNK": 20}),
        (qdrant, {"NUMBERS": 16 * 16, "DOCUMENTS": 3}),
    ):
        for name, size in sizes.items():
            monkeypatch.setattr(module, name, size)


def given(name: str) -> Found:
    """The documents of a kind's folder: vectors rounded to its format, or terms with weights."""
    kind = KINDS[name]
    if isinstance(kind.batch(0, 1), TokenBatch):
        found = dict(zip(getattr(kind, "ids", range(COUNT)), kind.expected, strict=True))
    else:
        documents = kind.documents
        pairs = zip(documents.terms.tolist(), documents.weights.tolist(), strict=True)
        entries = [[next(pairs) for _ in range(n)] for n in documents.offsets.diff().tolist()]
        found = dict(zip(getattr(kind, "ids", range(COUNT)), entries, strict=True))
    for removed in ["a3"] if name in ("index", "saved") else []:
        del found[removed]
    return found


def of_parquet(at: Path) -> Found:
    rows = read_table(at).to_pylist()
    assert len({row["id"] for row in rows}) == len(rows)
    return {
        row["id"]: row.get("vectors") or [*zip(row.get("indices", ()), row.get("values", ()), strict=True)]
        for row in rows
    }


def of_plaid(at: Path) -> Found:
    corpus = read_plaid(at)
    return dict(zip(corpus.ids, vectors(corpus.batches()), strict=True))


def of_qdrant(at: Path) -> Found:
    from qdrant_client import QdrantClient

    client = QdrantClient(path=str(at.parent))
    try:
        points, _ = client.scroll(at.name, limit=1000, with_vectors=True)
    finally:
        client.close()
    found = {point.payload["id"]: point.vector.get("vectors", []) for point in points}
    assert len(found) == len(points)
    return {each: [*zip(v.indices, v.values, strict=True)] if hasattr(v, "indices") else v for each, v in found.items()}


READ: dict[str, Callable[[Path], Found]] = {"parquet": of_parquet, "plaid": of_plaid, "qdrant": of_qdrant}
KINDS_OF = dict.fromkeys(READ, ("bfloat16", "int8", "residual", "index", "sparse", "saved"))
KINDS_OF |= {"plaid": ("residual", "index"), "qdrant": ("index", "saved")}


def kills(to: str, folder: Path, root: Path) -> Iterator[Path]:
    """Places that calls have left which were killed at some time, or cut off from power."""
    if to == "qdrant":
        from qdrant_client import QdrantClient

        upsert, calls = QdrantClient.upsert, 0

        def failing(*arguments: object, **named: object) -> None:
            nonlocal calls
            calls += 1
            if calls != number:
                upsert(*arguments, **named)
            elif is_partly_done:
                upsert(*arguments[:2], arguments[2][1:], **named)
            if calls == number:
                raise KeyboardInterrupt

        for number, is_partly_done in [(1, False), (1, True), (4, True), (6, False), (9, True)]:
            at, calls = root / f"{number}-{is_partly_done}" / "docs", 0
            with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(QdrantClient, "upsert", failing)
                export(folder, to, at)
            yield at
        return
    (root / "seen").mkdir(parents=True)
    found = states(root / "seen", lambda: export(folder, to, root / "seen"), cuts=1)
    assert len(found) > 15
    for number, (_, state) in enumerate(found[:: 1 if to == "parquet" else 3]):
        yield written(state, root / str(number))


@pytest.mark.parametrize(("to", "name"), [(to, name) for to in READ for name in KINDS_OF[to]])
def test_all_documents_are_there_once_also_after_a_kill(to, name, tmp_path):
    if to == "qdrant":
        pytest.importorskip("qdrant_client", reason=NEEDS_QDRANT)
    folder, at, expected = tmp_path / "from", tmp_path / "to" / "docs", given(name)
    KINDS[name].write(folder)
    for place in (at, at, *kills(to, folder, tmp_path / "killed")):
        assert export(folder, to, place) == len(expected)
        found = READ[to](place)
        assert {*found} == {*expected} and (to == "qdrant" or [*found] == [*expected])
        for each, stored in expected.items():
            ours, wanted = (torch.tensor(of).flatten() for of in (found[each], stored))
            assert ours.shape == wanted.shape
            if to == "plaid" and name == "index":  # of a codec that is trained here, on few tokens
                assert (torch.cosine_similarity(ours.view(-1, 16), wanted.view(-1, 16)) > 0.8).all()
                continue
            if to == "plaid":  # whose vectors have length 1
                wanted = torch.nn.functional.normalize(wanted.view(-1, 16), dim=-1).flatten()
            assert torch.allclose(ours, wanted, rtol=0, atol=0 if name in ("sparse", "saved") else 5e-4)  # float16


def test_what_search_keeps_and_ranks_have_written_is_exported_as_float32(tmp_path):
    for rank in range(2):
        write_corpus(
            tmp_path / "from" / "documents", [torch.full((2, 1, 4), rank + 1 / 3)], torch.float32, rank=(rank, 2)
        )
    assert export(tmp_path / "from", "parquet", tmp_path / "to") == 4
    assert of_parquet(tmp_path / "to") == {at: torch.full((1, 4), at // 2 + 1 / 3).tolist() for at in range(4)}


def test_what_is_written_for_lancedb_is_searched_by_it(tmp_path):
    lancedb = pytest.importorskip("lancedb", reason="needs lancedb, which no extra installs")
    kind = KINDS["index"]
    kind.write(tmp_path / "from")
    export(tmp_path / "from", "parquet", tmp_path / "to")
    table = lancedb.connect(tmp_path / "db").create_table("docs", dataset(tmp_path / "to"))
    query = max(kind.sequences, key=len)[:3]
    found = table.search(query.numpy()).distance_type("cosine").limit(5).to_list()
    expected = {each: float(maxsim([query], [torch.tensor(of)])) for each, of in given("index").items() if of}
    for row in found:
        assert len(query) - row["_distance"] == pytest.approx(expected[row["id"]], abs=5e-3)
    assert [row["id"] for row in found] == sorted(expected, key=expected.get, reverse=True)[:5]


# FROM: an index. The others say what is not right with them; of CHANGED an export was begun before FROM was.
@case_table("""
folder | to | at | said
EMPTY | parquet | NEW | EMPTY must hold a SparseIndex, a corpus of write_corpus or an index of indexes.Exact, whole;
GONE | parquet | NEW | GONE holds no documents.
LARGE | parquet | NEW | export: vectors hold numbers that are too large for float16; normalise them.
MIXED | parquet | NEW | export: ids must be all strings, or all integers of 64 bits, as one column.
SPARSE | plaid | NEW | export: an index of PLAID holds token embeddings, but these are sparse vectors.
FROM | parquet | OTHER | OTHER must be empty; choose another folder, or remove what it holds.
FROM | plaid | OTHER | OTHER must be empty; choose another folder, or remove what it holds.
FROM | parquet | OTHER/file | File exists: 'ROOT/OTHER/file'
FROM | parquet | CHANGED | CHANGED was written from something else, or before that was changed; choose another
FROM | qdrant | CHANGED/docs | CHANGED/docs holds something else, or was written before the folder was changed
FROM | qdrant | docs: | export: Qdrant is given as URL/COLLECTION, as http://localhost:6333/docs, got docs:.
FROM | qdrant | http://localhost | export: Qdrant is given as URL/COLLECTION, as http://localhost:6333/docs, got h
FROM | qdrant | http://127.0.0.1:1/docs | export: http://127.0.0.1:1/docs cannot be written ([Errno 111] Connection
    refused); what it holds stays, and the same command goes on from there.
""")
def test_what_cannot_be_exported_is_one_sentence(folder, to, at, said, tmp_path):
    if to == "qdrant":
        pytest.importorskip("qdrant_client", reason=NEEDS_QDRANT)
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "OTHER").mkdir()
    for name in ("file", "unfinished-work"):
        (tmp_path / "OTHER" / name).touch()
    KINDS["sparse"].write(tmp_path / "SPARSE")
    place = at if ":" in at else tmp_path / at
    for name, ids, size in (("FROM", "a", 1.0), ("LARGE", "a", 1e6), ("MIXED", ["a", 1], 1.0), ("GONE", "a", 1.0)):
        index = Exact(tmp_path, name, device="cpu").add_documents(ids, [torch.full((1, 16), size)] * len(ids))
        if name == "FROM" and "CHANGED" in at:
            export(tmp_path / name, to, str(place))
            index.add_documents("new", [torch.ones(1, 16)])
        if name == "GONE":
            index.remove_documents("a")
    done = fastmaxsim(["export", tmp_path / folder, "--to", to, "--at", place], code=1)
    assert said.replace("ROOT", str(tmp_path)) in done.stderr and (tmp_path / "OTHER" / "unfinished-work").exists()
    assert done.stderr.startswith("fastmaxsim: ") and done.stderr.count("\n") == 1
