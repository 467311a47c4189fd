"""A sparse index on disk: saved, built there, interrupted and gone on with, and damaged."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from pylate_fastmaxsim import SparseBatch, SparseIndex
from pylate_fastmaxsim.files.record import read_record, write_record
from pylate_fastmaxsim.kernels.sparse import postings
from pylate_fastmaxsim.retrieval import sparse_files
from tests.support.full_disk import no_file_above
from tests.support.power_cut import states, written
from tests.support.sparse_vectors import sorted_scores, sparse_vectors

VOCABULARY = 30
CUTS = 3  # at each event


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(postings, "DOCUMENTS_PER_BLOCK", 8)


@pytest.fixture
def documents() -> SparseBatch:
    return sparse_vectors(37, VOCABULARY, seed=0)


def rest(documents: SparseBatch, size: int = 3):
    """What ``SparseIndex.build`` calls with the number of documents that a folder holds."""

    def batches(held: int):
        for begin in range(held, len(documents), size):
            yield documents.select(torch.arange(begin, min(begin + size, len(documents))))

    return batches


def assert_finds(index: SparseIndex, documents: SparseBatch, removed: set[int] = frozenset()) -> None:
    for ours, theirs in zip(index.search(documents, 9), sorted_scores(documents, documents, 9, removed), strict=True):
        assert torch.equal(ours, theirs)


def assert_mapped(index: SparseIndex, folder: Path) -> None:
    """All entries lie in mappings of the folder's files."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
    ranges = [[int(end, 16) for end in line[0].split("-")] for line in lines]
    for block in index._blocks:
        for tensor in (block.terms, block.weights):
            assert any(begin <= tensor.data_ptr() < end for begin, end in ranges)


def blocks(folder) -> list[str]:
    return sorted(file.name for file in folder.iterdir() if file.name != "lock")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("vocabulary", [VOCABULARY, 1 << 20])
def test_what_is_loaded_is_what_was_saved(dtype, vocabulary, tmp_path):
    documents = sparse_vectors(37, vocabulary, seed=1, dtype=dtype)
    index = SparseIndex.build([documents])
    index.remove([4, 36])
    index.save(tmp_path / "index")
    loaded = SparseIndex.load(tmp_path / "index")
    assert (len(loaded), loaded.vocabulary, loaded.dtype, loaded.nbytes) == (37, vocabulary, dtype, index.nbytes)
    assert_finds(loaded, documents, {4, 36})
    assert_mapped(loaded, tmp_path)
    entry = (2 if vocabulary == VOCABULARY else 4) + dtype.itemsize
    assert loaded.nbytes == len(documents.terms) * entry + (37 + 5) * 8


def test_saving_again_writes_what_has_changed(documents, tmp_path):
    index = SparseIndex.build([documents])
    index.save(tmp_path)
    old = {file.name: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    other = SparseIndex.load(tmp_path)
    index.add([documents])
    index.remove([0])
    index.save(tmp_path)
    new = {file.name: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    kept = {name for name in new if new[name] == old.get(name) and name != "lock"}
    # The last block of before stays for one generation, since a reader may have yet to open it.
    assert sorted(name[:14] for name in kept) == [f"block-0000000{i}" for i in range(5)]
    both = SparseBatch.concatenate([documents, documents])
    assert_finds(SparseIndex.load(tmp_path), both, {0})
    assert_finds(other, documents)  # still reads what it has mapped


def test_the_folder_holds_the_index_of_before_until_the_new_one_is_complete(documents, tmp_path, monkeypatch):
    index = SparseIndex.build([documents])
    index.save(tmp_path)
    index.add([documents])
    with monkeypatch.context() as patch:
        patch.setattr(sparse_files, "write_description", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            index.save(tmp_path)
    assert_finds(SparseIndex.load(tmp_path), documents)
    index.save(tmp_path)
    assert len(SparseIndex.load(tmp_path)) == 74 and len(blocks(tmp_path)) == 12


def test_what_others_have_saved_is_not_overwritten(documents, tmp_path):
    SparseIndex.build([documents]).save(tmp_path)
    one, other = SparseIndex.load(tmp_path), SparseIndex.load(tmp_path)
    one.remove([0])
    one.save(tmp_path)
    other.add([documents])
    with pytest.raises(ValueError, match="^SparseIndex.save: .* was written by others since this index was loaded"):
        other.save(tmp_path)
    one.save(tmp_path)
    assert_finds(SparseIndex.load(tmp_path), documents, {0})


def test_one_process_at_a_time_writes_a_folder_and_several_read_it(documents, tmp_path):
    index = SparseIndex.build(rest(documents), folder=tmp_path)
    with FileLock(tmp_path / "lock"):
        for write in (index.save, lambda folder: SparseIndex.build(rest(documents), folder=folder)):
            with pytest.raises(ValueError, match="is being written by another process; wait until it ends, or choose"):
                write(tmp_path)
        assert_finds(SparseIndex.load(tmp_path), documents)
    index.save(tmp_path)
    assert "lock" not in blocks(tmp_path)


def test_a_share_of_one_needs_no_process_group(documents, tmp_path):
    """As on a single GPU, where ``accelerate launch`` makes none."""
    SparseIndex.build([documents]).save(tmp_path)
    assert_finds(SparseIndex.load(tmp_path, shard=(0, 1)), documents)


def test_others_may_read_the_files_of_an_index(documents, tmp_path):
    """Files of safetensors are for their owner only."""
    SparseIndex.build([documents]).save(tmp_path / "index")
    (tmp_path / "plain").touch()
    modes = {file.stat().st_mode for file in [*(tmp_path / "index").iterdir(), tmp_path / "plain"]}
    assert len(modes) == 1


def test_a_folder_that_was_deleted_is_written_again(documents, tmp_path):
    SparseIndex.build(rest(documents), folder=tmp_path / "built")
    index = SparseIndex.load(tmp_path / "built", "cpu:0")
    shutil.rmtree(tmp_path / "built")
    index.save(tmp_path / "built")
    assert_finds(SparseIndex.load(tmp_path / "built"), documents)
    shutil.rmtree(tmp_path / "built")
    index.save(tmp_path / "other")
    assert_finds(SparseIndex.load(tmp_path / "other"), documents)


def test_a_folder_with_something_else_is_left_alone(documents, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="^SparseIndex.save: .* must be empty, or the folder that this index is from"):
        SparseIndex.build([documents]).save(tmp_path)
    with pytest.raises(ValueError, match="^SparseIndex.build: .* must be empty, unless batches is a function"):
        SparseIndex.build([documents], folder=tmp_path)
    assert blocks(tmp_path) == ["notes.txt"]


def test_an_interrupted_build_goes_on(documents, tmp_path):
    half_built(tmp_path, documents)
    with pytest.raises(ValueError, match="^SparseIndex.load: .* holds no complete index, since it has no index.json"):
        SparseIndex.load(tmp_path)
    asked = []

    def batches(held: int):
        asked.append(held)
        return rest(documents)(held)

    built = SparseIndex.build(batches, folder=tmp_path)
    assert asked == [16]
    assert_finds(built, documents)
    assert_finds(SparseIndex.load(tmp_path), documents)


def test_a_finished_build_goes_on_with_more_documents(documents, tmp_path):
    index = SparseIndex.build(rest(documents), folder=tmp_path)
    index.remove([1, 36])
    index.save(tmp_path)
    assert_finds(SparseIndex.build(rest(documents), folder=tmp_path), documents, {1, 36})
    more = SparseBatch.concatenate([documents, sparse_vectors(30, VOCABULARY, seed=5)])
    assert_finds(SparseIndex.build(rest(more), folder=tmp_path), more, {1, 36})
    assert_finds(SparseIndex.load(tmp_path), more, {1, 36})
    with pytest.raises(ValueError, match="^SparseIndex.build: batches must have the vocabulary 30, got 31.$"):
        SparseIndex.build(lambda held: [sparse_vectors(1, 31, seed=0)], folder=tmp_path)


def test_more_documents_go_on_where_adding_them_was_interrupted(documents, tmp_path):
    SparseIndex.build(rest(documents), folder=tmp_path)
    more = SparseBatch.concatenate([documents, sparse_vectors(30, VOCABULARY, seed=5)])
    asked = []

    def batches(held: int, interrupted: bool = True):
        asked.append(held)
        yield from rest(more.select(torch.arange(44)) if interrupted else more)(held)
        assert not interrupted

    with pytest.raises(AssertionError):
        SparseIndex.build(batches, folder=tmp_path)
    assert_finds(SparseIndex.load(tmp_path), documents)
    assert_finds(SparseIndex.build(lambda held: batches(held, False), folder=tmp_path), more)
    assert asked == [37, 40]
    assert len(blocks(tmp_path)) == 11


def test_blocks_are_read_from_disk_while_the_index_is_built(documents, tmp_path):
    """So that what is in memory does not grow with the collection."""
    index = SparseIndex.build(rest(documents), folder=tmp_path)
    assert_mapped(index, tmp_path)


@pytest.mark.parametrize("length", [0, 7, 40, -1])
def test_a_truncated_file_is_named(length, documents, tmp_path):
    SparseIndex.build([documents]).save(tmp_path)
    file = next(tmp_path.glob("block-00000002-*"))
    os.truncate(file, length if length >= 0 else file.stat().st_size - 1)
    for opened, where in (
        (SparseIndex.load, "load"),
        (lambda folder: SparseIndex.build(rest(documents), folder=folder), "build"),
    ):
        with pytest.raises(ValueError, match=rf"^SparseIndex.{where}: {file} is truncated or damaged \(.*\); build"):
            opened(tmp_path)
    file.unlink()
    with pytest.raises(ValueError, match=f"^SparseIndex.load: {file} is missing; build the index again.$"):
        SparseIndex.load(tmp_path)


def test_files_of_something_else_are_named(documents, tmp_path):
    index = SparseIndex.build([documents])
    index.save(tmp_path)
    description = read_record(tmp_path / "index.json")
    for change, sentence in (
        ({"format": "other"}, "is damaged, or of another release"),
        ({"documents_per_block": 9}, "has blocks of 9 documents, but this release has 8"),
    ):
        write_record(tmp_path / "index.json", {**description, **change})
        with pytest.raises(ValueError, match=f"^SparseIndex.load: .*{sentence}"):
            SparseIndex.load(tmp_path)


FLIPS = 25  # of each file


def interrupt_after(batches: int, documents: SparseBatch):
    def interrupted(held: int):
        for number, batch in enumerate(rest(documents)(held)):
            if number == batches:
                raise KeyboardInterrupt
            yield batch

    return interrupted


def saved(folder: Path, documents: SparseBatch) -> None:
    index = SparseIndex.build([documents])
    index.remove([3])
    index.save(folder)


def half_built(folder: Path, documents: SparseBatch) -> None:
    with pytest.raises(KeyboardInterrupt):
        SparseIndex.build(interrupt_after(7, documents), folder=folder)


def find_removed(folder: Path, documents: SparseBatch) -> None:
    assert_finds(SparseIndex.load(folder), documents, {3})


def go_on(folder: Path, documents: SparseBatch) -> None:
    assert_finds(SparseIndex.build(rest(documents), folder=folder), documents)


@pytest.mark.parametrize(("write", "read"), [(saved, find_removed), (half_built, go_on)])
def test_a_flipped_bit_changes_no_answer(write, read, documents, tmp_path):
    write(tmp_path / "index", documents)
    numbers, found = random.Random(0), 0
    for file in sorted((tmp_path / "index").iterdir()):
        for trial in range(FLIPS if file.name != "lock" else 0):
            folder = shutil.copytree(tmp_path / "index", tmp_path / f"{file.name[:14]}-{trial}")
            damaged = bytearray(file.read_bytes())
            damaged[numbers.randrange(len(damaged))] ^= 1 << numbers.randrange(8)
            (folder / file.name).write_bytes(damaged)
            try:
                read(folder, documents)
            except ValueError as error:
                assert str(folder / file.name) in str(error) and "\n" not in str(error)
                found += 1
    assert found > FLIPS


def test_blocks_in_each_others_place_are_refused(documents, tmp_path):
    SparseIndex.build([documents]).save(tmp_path)
    one, other = (next(tmp_path.glob(f"block-0000000{number}-*")) for number in (0, 1))
    contents = one.read_bytes(), other.read_bytes()
    one.write_bytes(contents[1])
    other.write_bytes(contents[0])
    with pytest.raises(ValueError, match="is damaged"):
        SparseIndex.load(tmp_path).search(documents, 3)


def test_threads_lose_no_documents_and_an_index_is_pickled(documents):
    index = SparseIndex.build([documents])
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: index.add([documents]), range(40)))
    assert len(index) == 41 * len(documents)
    again = pickle.loads(pickle.dumps(index))
    assert all(map(torch.equal, again.search(documents, 9), index.search(documents, 9)))


def test_readers_beside_a_writer_get_one_generation(documents, tmp_path):
    index = SparseIndex.build([documents])
    index.save(tmp_path)
    ends = time.monotonic() + 1

    def read(_):
        while time.monotonic() < ends:
            loaded = SparseIndex.load(tmp_path)
            held = SparseBatch.concatenate([documents] * (len(loaded) // len(documents)))
            assert len(held) == len(loaded)
            assert len(loaded.search(documents, 1)[0]) == len(documents)

    with ThreadPoolExecutor(4) as threads:
        readers = threads.map(read, range(4))
        while time.monotonic() < ends:
            index.add([documents])
            index.save(tmp_path)
        list(readers)


def one_of(folder: Path, documents: SparseBatch, sizes: set[int]) -> None:
    """The folder opens as the index of one of these sizes."""
    index = SparseIndex.load(folder)
    assert len(index) in sizes
    assert_finds(index, documents.select(torch.arange(len(index))))


def save_more(folder: Path, documents: SparseBatch) -> None:
    index = SparseIndex.load(folder)
    index.add([documents.select(torch.arange(len(index), len(documents)))])
    index.save(folder)


def build_more(folder: Path, documents: SparseBatch) -> None:
    SparseIndex.build(rest(documents), folder=folder)


@pytest.mark.parametrize("write", [save_more, build_more])
def test_kills_and_power_cuts_lose_no_index(write, documents, tmp_path):
    few = documents.select(torch.arange(21))
    SparseIndex.build([few]).save(tmp_path / "root")
    found = states(tmp_path / "root", lambda: write(tmp_path / "root", documents), cuts=CUTS)
    assert len(found) > 10
    for number, (kind, state) in enumerate(found):
        folder = written(state, tmp_path / str(number))
        one_of(folder, documents, {37} if kind == "end" else {21, 37})
        write(folder, documents)
        one_of(folder, documents, {37})
        shutil.rmtree(folder)


def test_a_first_build_goes_on_after_kills_and_power_cuts(documents, tmp_path):
    (tmp_path / "root").mkdir()
    for number, (_, state) in enumerate(
        states(tmp_path / "root", lambda: build_more(tmp_path / "root", documents), cuts=CUTS)
    ):
        folder = written(state, tmp_path / str(number))
        build_more(folder, documents)
        one_of(folder, documents, {37})


@pytest.mark.parametrize("write", [save_more, build_more])
def test_a_full_disk_leaves_the_index_of_before(write, documents, tmp_path):
    SparseIndex.build([documents.select(torch.arange(21))]).save(tmp_path / "root")
    write(shutil.copytree(tmp_path / "root", tmp_path / "more"), documents)
    largest = max(
        file.stat().st_size
        for file in set((tmp_path / "more").iterdir())
        if file.name not in os.listdir(tmp_path / "root")
    )
    for size in (*range(0, largest, 40), largest - 1):
        folder = shutil.copytree(tmp_path / "root", tmp_path / str(size))
        with no_file_above(size), pytest.raises(OSError, match="File too large"):
            write(folder, documents)
        one_of(folder, documents, {21})
        write(folder, documents)
        one_of(folder, documents, {37})


def test_an_index_that_could_not_be_saved_elsewhere_is_saved_where_it_is_from(documents, tmp_path):
    saved(tmp_path / "index", documents)
    index = SparseIndex.load(tmp_path / "index")
    index.add([documents])
    with no_file_above(10), pytest.raises(OSError):
        index.save(tmp_path / "other")
    index.save(tmp_path / "index")
    assert len(SparseIndex.load(tmp_path / "index")) == 2 * len(documents)


def test_what_others_have_begun_to_build_anew_is_not_mixed_with_an_index(documents, tmp_path):
    saved(tmp_path / "index", documents)
    index = SparseIndex.load(tmp_path / "index")
    shutil.rmtree(tmp_path / "index")
    half_built(tmp_path / "index", documents)
    with pytest.raises(ValueError, match="^SparseIndex.save: .* was written by others since this index was loaded"):
        index.save(tmp_path / "index")


def test_the_same_index_is_the_same_bytes(documents, tmp_path):
    for name in "ab":
        SparseIndex.build([documents]).save(tmp_path / name)
    files = [sorted((tmp_path / name).glob("block-*")) for name in "ab"]
    assert [file.name for file in files[0]] == [file.name for file in files[1]]
    assert [file.read_bytes() for file in files[0]] == [file.read_bytes() for file in files[1]]


def test_what_is_sound_is_kept_of_a_damaged_index(documents, tmp_path):
    saved(tmp_path, documents)
    description = sparse_files.read_description("", tmp_path)
    assert sparse_files.sound_blocks("check", tmp_path, description) == (5, None)
    os.truncate(next(tmp_path.glob("block-00000002-*")), 50)
    count, why = sparse_files.sound_blocks("check", tmp_path, description)
    assert count == 2 and why.startswith(f"check: {tmp_path}/block-00000002-")
    sparse_files.keep_blocks(tmp_path, description, count)
    assert_finds(SparseIndex.load(tmp_path), documents.select(torch.arange(16)), {3})
    assert_finds(SparseIndex.build(rest(documents), folder=tmp_path), documents, {3})


@pytest.mark.process
def test_a_killed_build_loses_no_finished_block(documents, tmp_path):
    program = (
        "import os, signal\n"
        "from pylate_fastmaxsim import SparseIndex\n"
        "from pylate_fastmaxsim.kernels.sparse import postings\n"
        "from tests.support.sparse_vectors import sparse_vectors\n"
        "from tests.retrieval.test_sparse_files import rest\n"
        "postings.DOCUMENTS_PER_BLOCK = 8\n"
        "def batches(held):\n"
        "    for number, batch in enumerate(rest(sparse_vectors(37, 30, seed=0))(held)):\n"
        "        if number == 6:\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        yield batch\n"
        f"SparseIndex.build(batches, folder={str(tmp_path)!r})\n"
    )
    held = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", program], timeout=120)
        assert done.returncode == -signal.SIGKILL
        held.append(sparse_files.read_unfinished("", tmp_path).documents)
    assert held == [16, 32]
    assert_finds(SparseIndex.build(rest(documents), folder=tmp_path), documents)
