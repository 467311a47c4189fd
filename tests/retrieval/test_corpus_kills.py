"""A corpus that is written: killed, cut off from power, on a full disk, and beside readers."""

from __future__ import annotations

import errno
import os
import random
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from pylate_fastmaxsim.retrieval.corpus import Corpus, write_corpus
from pylate_fastmaxsim.retrieval.formats import checksums, writer
from tests.support.corpora import codec, grouped, lists, unit_documents
from tests.support.power_cut import states, written

FORMATS = {"bfloat16": None, "int8": "int8", "fp8": "fp8", "residual": codec()}
SEQUENCES = unit_documents(20, seed=3)
BEFORE = 12  # documents of a corpus that is added to

CUTS, STATES = 2, 6  # power cuts at each event, and how many of all states are tried in each test


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(checksums, "CHUNK", 64)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # which takes its time; power cuts here are only thought of
    monkeypatch.setattr(writer, "SECONDS_BETWEEN_NOTES", 0.0)


def write(folder: Path, format: object, end: int = len(SEQUENCES), fails_at: int | None = None) -> Corpus:
    complete = len(documents_of(folder) or ()) if folder.exists() else 0

    def batches(held: int):
        assert held >= complete
        for begin in range(held, end, 4):
            if begin == fails_at:
                raise KeyboardInterrupt
            yield from grouped(SEQUENCES[begin : min(begin + 4, end)], 4)

    return write_corpus(folder, batches, format=format)


def interrupted(folder: Path, format: object) -> None:
    with pytest.raises(KeyboardInterrupt):
        write(folder, format, fails_at=BEFORE + 4)


def with_left_overs(folder: Path, format: object) -> None:
    """Of a call that was killed before it noted what it had written."""
    for file in write(folder, format, end=BEFORE).folder.glob("*.bin"):
        if not file.name.startswith("checksums-"):
            file.write_bytes(file.read_bytes() + bytes(3000))


def killed_at_its_start(folder: Path, format: object) -> None:
    """All that may be there before the first document counts."""
    writer.clear(folder)
    for name in ("codec.safetensors", "values.bin", "bounds.bin"):
        (folder / name).write_bytes(b"unfinished")


STARTS: dict[str, Callable[[Path, object], object]] = {
    "new": lambda folder, format: None,
    "begun": killed_at_its_start,
    "interrupted": interrupted,
    "corpus": lambda folder, format: write(folder, format, end=BEFORE),
    "corpus and left-overs": with_left_overs,
    "corpus and interrupted": lambda folder, format: (write(folder, format, end=BEFORE), interrupted(folder, format)),
}


def documents_of(folder: Path) -> list | None:
    """What a folder holds; None if it is no complete corpus."""
    try:
        corpus = Corpus(folder)
    except ValueError as error:
        assert "holds no complete corpus" in str(error)
        return None
    batches = [batch if corpus.dtype else batch.decompress() for batch in corpus.batches()]
    assert lists(batches) == lists([each if corpus.dtype else each.decompress() for each in halves(corpus)])
    return lists(batches)


def halves(corpus: Corpus) -> list:
    middle = len(corpus) // 2
    return [corpus.select([*range(middle)]), corpus.select([*range(middle, len(corpus))])]


@pytest.fixture(params=FORMATS)
def format(request) -> object:
    return FORMATS[request.param]


@pytest.fixture(params=STARTS)
def root(request, format, tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "root"
    folder.mkdir()
    STARTS[request.param](folder, format)
    if "interrupted" in request.param:  # so that a journal counts less than the corpus that is finished next
        monkeypatch.setattr(writer, "SECONDS_BETWEEN_NOTES", 60.0)
    return folder


@pytest.fixture
def after(format, tmp_path_factory) -> list:
    return documents_of(write(tmp_path_factory.mktemp("whole"), format).folder)


def test_after_a_kill_or_a_power_cut_the_old_or_the_new_is_there(root, format, after, tmp_path):
    before = documents_of(root)
    found = states(root, lambda: write(root, format), CUTS)
    assert documents_of(root) == after and {kind for kind, _ in found} == {"kill", "cut", "end"}
    assert len(list(root.glob("checksums-*"))) == 1 and not (root / "unfinished.json").exists()
    for number, (kind, state) in enumerate(random.Random(0).sample(found, min(STATES, len(found)))):
        left = written(state, tmp_path / str(number))
        assert documents_of(left) in ([after] if kind == "end" else [before, after])
        write(left, format)
        assert documents_of(left) == after


@pytest.mark.parametrize("calls", range(0, 21, 4))
def test_an_interruption_between_the_files_of_a_batch_loses_that_batch_only(calls, format, after, tmp_path):
    stock, left = writer.Writer._write, [calls]

    def write_or_fail(self, name, tensor):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        stock(self, name, tensor)

    write(tmp_path, format, end=1)
    with pytest.MonkeyPatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(writer.Writer, "_write", write_or_fail)
        write(tmp_path, format)
    write(tmp_path, format)
    assert documents_of(tmp_path) == after


@contextmanager
def no_room(limit: int) -> Iterator[None]:
    """Files end at so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def no_room_later(calls: int) -> Iterator[None]:
    """The system says so when it is to have bytes on the disk."""
    fsync, left = os.fsync, [calls]

    def full(descriptor: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", full)
        yield


LIMITS, CALLS = range(0, 1400, 330), range(0, 50, 11)


@pytest.mark.parametrize(("full", "at"), [(no_room, LIMITS), (no_room_later, CALLS)], ids=["write", "fsync"])
def test_on_a_full_disk_the_old_stays_whole(full, at, root, format, after, tmp_path):
    before, failed = documents_of(root), 0
    state = {str(file.relative_to(root)): file.read_bytes() for file in root.iterdir()}
    for number in at:
        left = written(state, tmp_path / str(number))
        try:
            with full(number):
                write(left, format)
        except OSError as error:
            assert str(left) in str(error) and "\n" not in str(error)
            failed += 1
            assert documents_of(left) in (before, after)
        write(left, format)
        assert documents_of(left) == after
    assert failed


SECONDS = 0.2


def test_readers_beside_a_writer_see_one_generation(format, tmp_path):
    expected = documents_of(write(tmp_path / "whole", format).folder)
    folder, loads, wrong, ended = tmp_path / "new", [], [], threading.Event()
    write(folder, format, end=1)

    def read() -> None:
        while not ended.is_set():
            try:
                corpus = Corpus(folder)
                found = lists([each if corpus.dtype else each.decompress() for each in halves(corpus)])
                loads.append(found == expected[: len(corpus)])
            except BaseException as error:  # shown below
                wrong.append(error)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for end in range(2, len(SEQUENCES) + 1, 2):
        write(folder, format, end=end)
        ended.wait(SECONDS / len(SEQUENCES))
    ended.set()
    for reader in readers:
        reader.join()
    assert not wrong and len(loads) > 5 and all(loads)
    assert documents_of(folder) == expected


def test_an_open_corpus_stays_while_others_add_to_it(format, tmp_path):
    read = write(tmp_path, format, end=BEFORE)
    write(tmp_path, format)
    assert len(read) == BEFORE
    read.verify()
    found = lists([each if read.dtype else each.decompress() for each in halves(read)])
    assert found == documents_of(tmp_path)[:BEFORE]
