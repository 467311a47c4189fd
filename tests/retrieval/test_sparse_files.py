"""A sparse index on disk: what is written, by whom, and gone on with. Kills and damage are in ``test_storage_*``."""

import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from pylate_fastmaxsim import SparseBatch, SparseIndex
from pylate_fastmaxsim.files.lock import writing
from pylate_fastmaxsim.files.record import read_record
from pylate_fastmaxsim.retrieval.sparse import files as sparse_files
from tests.support.power_cut import states, written
from tests.support.sparse_vectors import assert_same, sorted_scores, sparse_vectors
from tests.support.stored import contents, files, interrupt, shrink


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    shrink(monkeypatch)


@pytest.fixture
def documents() -> SparseBatch:
    return sparse_vectors(37, 30, seed=0)


def rest(documents: SparseBatch, fails: bool = False):
    def batches(held: int):
        yield from (documents.select(part) for part in torch.arange(held, len(documents)).split(3) if len(part))
        if fails:
            interrupt()

    return batches


def assert_finds(index: SparseIndex, documents: SparseBatch, removed: set[int] = frozenset()) -> None:
    assert len(index) == len(documents)
    assert_same(index.search(documents, 9), sorted_scores(documents, documents, 9, removed))


def assert_mapped(folder: Path) -> None:
    """All blocks of the folder are read where they are."""
    mapped = Path("/proc/self/maps").read_text()
    assert all(str(file) in mapped for file in folder.glob("block-*"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("vocabulary", [30, 1 << 20])
def test_what_is_loaded_is_what_was_saved(dtype, vocabulary, tmp_path):
    documents = sparse_vectors(37, vocabulary, seed=1, dtype=dtype)
    index = SparseIndex.build([documents])
    index.remove([4, 36])
    index.save(tmp_path / "index")
    # A shard of one needs no process group, as on a single GPU, where ``accelerate launch`` makes none.
    for loaded in (SparseIndex.load(tmp_path / "index"), SparseIndex.load(tmp_path / "index", shard=(0, 1))):
        assert (loaded.vocabulary, loaded.dtype, loaded.nbytes) == (vocabulary, dtype, index.nbytes)
        assert_finds(loaded, documents, {4, 36})
        assert_mapped(tmp_path / "index")
    entry = (2 if vocabulary == 30 else 4) + dtype.itemsize
    assert loaded.nbytes == len(documents.terms) * entry + (37 + 5) * 8
    SparseIndex.build([documents]).save(tmp_path / "again")
    assert contents(tmp_path / "again") == contents(tmp_path / "index")
    # That of releases that know no ids.
    assert read_record(tmp_path / "index" / "index.json")["format"] == "pylate-fastmaxsim sparse index 2"
    # Others may read it, though files of safetensors are for their owner only.
    (tmp_path / "plain").touch()
    assert len({file.stat().st_mode for file in [*(tmp_path / "index").iterdir(), tmp_path / "plain"]}) == 1


def test_saving_again_writes_what_has_changed(documents, tmp_path):
    index = SparseIndex.build([documents])
    index.save(tmp_path)
    old = {file.name: file.stat().st_mtime_ns for file in files(tmp_path)}
    other = SparseIndex.load(tmp_path)
    index.add([documents])
    index.remove([0])
    index.save(tmp_path)
    kept = [file.name for file in files(tmp_path) if file.stat().st_mtime_ns == old.get(file.name)]
    # The last block of before stays for one generation, since a reader may have yet to open it.
    assert [name[:14] for name in kept] == [f"block-0000000{i}" for i in range(5)]
    both = SparseBatch.concatenate([documents, documents])
    assert_finds(SparseIndex.load(tmp_path), both, {0})
    assert_finds(other, documents)  # still reads what it has mapped
    index.save(tmp_path)
    assert len(files(tmp_path)) == 11


def test_what_others_have_written_is_not_overwritten(documents, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "notes.txt").write_text("mine")
    SparseIndex.build([documents]).save(tmp_path / "index")
    SparseIndex.build([documents]).save(tmp_path / "anew")
    one, other = (SparseIndex.load(tmp_path / "index") for _ in range(2))
    anew = SparseIndex.load(tmp_path / "anew")
    one.remove([0])
    one.save(tmp_path / "index")
    other.add([documents])
    shutil.rmtree(tmp_path / "anew")
    with pytest.raises(KeyboardInterrupt):
        SparseIndex.build(rest(documents.select(torch.arange(21)), fails=True), folder=tmp_path / "anew")

    build = partial(SparseIndex.build, [documents])
    of_other_vocabulary = partial(SparseIndex.build, lambda held: [sparse_vectors(1, 31, seed=0)])
    for folder, write, sentence in (
        ("index", other.save, "SparseIndex.save: .* was written by others since this index was loaded"),
        ("anew", anew.save, "SparseIndex.save: .* was written by others since this index was loaded"),
        ("notes", one.save, "SparseIndex.save: .* must be empty, or the folder that this index is from"),
        ("notes", build, "SparseIndex.build: .* must be empty, unless"),
        ("index", build, "SparseIndex.build: .* must be empty, unless"),
        ("index", of_other_vocabulary, "SparseIndex.build: batches must have the vocabulary 30"),
    ):
        with pytest.raises(ValueError, match=f"^{sentence}"):
            write(folder=tmp_path / folder)
    assert [file.name for file in files(tmp_path / "notes")] == ["notes.txt"]
    with pytest.raises(ValueError, match="^SparseIndex.load: .* holds no complete index, since it has no index.json"):
        SparseIndex.load(tmp_path / "anew")
    with writing("test", tmp_path / "index"):
        for write in (one.save, partial(SparseIndex.build, rest(documents))):
            with pytest.raises(ValueError, match="is being written by another process; wait until it ends, or choose"):
                write(folder=tmp_path / "index")
        assert_finds(SparseIndex.load(tmp_path / "index"), documents, {0})
    one.save(tmp_path / "index")
    assert_finds(SparseIndex.load(tmp_path / "index"), documents, {0})
    assert_finds(SparseIndex.build(rest(documents), folder=tmp_path / "anew"), documents)


def test_a_folder_that_was_deleted_is_no_loss(documents, tmp_path):
    SparseIndex.build(rest(documents), folder=tmp_path / "built")
    index = SparseIndex.load(tmp_path / "built", "cpu:0")
    for folder in ("built", "other"):
        shutil.rmtree(tmp_path / "built", ignore_errors=True)
        index.save(tmp_path / folder)
        assert_finds(SparseIndex.load(tmp_path / folder), documents)


def test_a_build_goes_on_with_more_documents(documents, tmp_path):
    index = SparseIndex.build(rest(documents), folder=tmp_path)
    assert_mapped(tmp_path)  # so that what is in memory does not grow with the collection
    index.remove([1, 36])
    index.save(tmp_path)
    assert_finds(SparseIndex.build(rest(documents), folder=tmp_path), documents, {1, 36})
    more = SparseBatch.concatenate([documents, sparse_vectors(30, 30, seed=5)])
    with pytest.raises(KeyboardInterrupt):
        SparseIndex.build(rest(more.select(torch.arange(44)), fails=True), folder=tmp_path)
    assert_finds(SparseIndex.load(tmp_path), documents, {1, 36})
    assert sparse_files.read_unfinished("", tmp_path).documents == 40
    begun = (tmp_path / "unfinished.json").read_bytes()
    assert_finds(SparseIndex.build(rest(more), folder=tmp_path), more, {1, 36})
    assert_finds(SparseIndex.load(tmp_path), more, {1, 36})
    assert len(files(tmp_path)) == 11
    index = SparseIndex.load(tmp_path)
    index.remove([0])
    index.save(tmp_path)
    (tmp_path / "unfinished.json").write_bytes(begun)  # as a kill leaves it before it is removed
    assert_finds(SparseIndex.build(rest(more), folder=tmp_path), more, {0, 1, 36})


def test_a_build_goes_on_with_ids(documents, tmp_path):
    ids = [f"d{number}" for number in range(len(documents))]
    with pytest.raises(KeyboardInterrupt):
        SparseIndex.build(rest(documents.select(torch.arange(21)), fails=True), folder=tmp_path, ids=ids)
    for wrong, sentence in (
        (None, "ids must be given, since the documents of the index have ids"),
        (ids[1:], f"ids must begin with those of the 16 documents in {tmp_path}."),
        (ids[:20], "ids must be as many as documents, got 4 for more than 4."),
        ([*ids, "more"], "ids must be as many as documents, got 22 for 21."),
    ):
        with pytest.raises(ValueError, match=f"^SparseIndex.build: {sentence}"):
            SparseIndex.build(rest(documents), folder=tmp_path, ids=wrong)
    assert_finds(index := SparseIndex.build(rest(documents), folder=tmp_path, ids=ids), documents)
    assert index.ids == SparseIndex.load(tmp_path).ids == ids


def _update(index: SparseIndex) -> None:
    index.update(index.vectors(ids=[4, 9]), ids=[9, 4])


@pytest.mark.parametrize("change", [_update, SparseIndex.compact])
def test_a_kill_leaves_the_vectors_of_each_id(change, documents, tmp_path):
    index = SparseIndex.build([documents], ids=range(37))
    index.remove([0, 20, 36])
    index.save(tmp_path / "root")
    before = SparseIndex.build([documents], ids=range(37))
    before.remove([0, 20, 36])
    change(index)
    seen = set()
    for number, (_, left) in enumerate(states(tmp_path / "root", lambda: index.save(tmp_path / "root"), cuts=3)):
        found = SparseIndex.load(written(left, tmp_path / str(number)))
        expected = before if len(found) == 37 else index
        seen.add(expected)
        assert found.ids == expected.ids
        assert_same(found.search(documents, 5), expected.search(documents, 5))
    assert seen == {before, index}


def test_threads_lose_no_documents_and_an_index_is_pickled(documents):
    index = SparseIndex.build([documents])
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: index.add([documents]), range(40)))
    assert len(index) == 41 * len(documents)
    assert_same(pickle.loads(pickle.dumps(index)).search(documents, 9), index.search(documents, 9))
