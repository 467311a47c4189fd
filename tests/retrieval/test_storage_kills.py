"""Folders of each kind that are written: killed, cut off from power, on a full disk, and beside readers."""

import errno
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import pytest

from pylate_fastmaxsim.retrieval.formats import writer
from tests.support.full_disk import no_file_above
from tests.support.power_cut import states, written
from tests.support.stored import BEFORE, COUNT, KINDS, SIZE, Corpora, Kind, Saved, contents, interrupt, shrink

CUTS, STATES = 3, 6  # power cuts at each event, and how many of all states are tried of each corpus


@pytest.fixture(autouse=True)
def small(monkeypatch):
    shrink(monkeypatch)


def interrupted(kind: Kind, folder: Path, fail_at: int = BEFORE + SIZE, fail: Callable[[], None] = interrupt) -> None:
    with pytest.raises((KeyboardInterrupt, ValueError, OSError)):
        kind.write(folder, fail_at=fail_at, fail=fail)


def starts_of(kind: Kind) -> list[str]:
    if isinstance(kind, Saved):  # what a save has begun in a new folder, another index does not go on with
        return ["complete"]
    begun = ["interrupted", "complete and interrupted"] if kind.goes_on else []
    return ["new", "complete", *begun, *(["begun", "left-overs"] if isinstance(kind, Corpora) else [])]


@pytest.fixture(params=[(name, start) for name in KINDS for start in starts_of(KINDS[name])], ids="-".join)
def case(request, tmp_path, monkeypatch) -> tuple[Kind, Path, int | None]:
    """A kind, a folder of it, and how many documents that holds."""
    (name, start), root = request.param, tmp_path / "root"
    kind = KINDS[name]
    root.mkdir()
    if start == "complete":
        kind.write(root, 9)
    if held := BEFORE if start.startswith(("complete", "left-overs")) else None:
        kind.write(root, BEFORE)
    if "interrupted" in start:
        interrupted(kind, root)
        # So that a journal counts less than the corpus that is finished next.
        monkeypatch.setattr(writer, "SECONDS_BETWEEN_NOTES", 60.0)
    if start == "begun":  # all that may be there before the first document counts
        writer.clear(root)
        for name in ("codec.safetensors", "values.bin", "bounds.bin"):
            (root / name).write_bytes(b"unfinished")
    if start == "left-overs":  # of a call that was killed before it noted what it had written
        for file in root.glob("*.bin"):
            if not file.name.startswith("checksums-"):
                file.write_bytes(file.read_bytes() + bytes(3000))
    return kind, root, held


@pytest.fixture(params=KINDS)
def kind(request) -> Kind:
    return KINDS[request.param]


def test_after_a_kill_or_a_power_cut_the_old_or_the_new_is_there(case, tmp_path):
    kind, root, before = case
    assert kind.held(root) == before
    found = states(root, lambda: kind.write(root), CUTS)
    assert kind.held(root) == COUNT and {state for state, _ in found} == {"kill", "cut", "end"}
    kind.write(tmp_path / "whole")
    assert contents(tmp_path / "whole").items() <= contents(root).items() and not (root / "unfinished.json").exists()
    if isinstance(kind, Corpora):
        assert len(list(root.glob("checksums-*"))) == 1
        found = random.Random(0).sample(found, min(STATES, len(found)))
    elif before:  # whose files stay for who is reading it, and no others
        for end in (BEFORE, 9):
            kind.write(tmp_path / f"of {end}", end)
        latest, older = (contents(tmp_path / f"of {end}").keys() for end in (BEFORE, 9))
        assert latest <= contents(root).keys() and not (older - latest) & contents(root).keys()
    for number, (state, left) in enumerate(found):
        folder = written(left, tmp_path / str(number))
        complete = kind.held(folder)
        assert complete in ([COUNT] if state == "end" else [before, COUNT])
        kind.write(folder)
        # A journal that counts less than a corpus that was finished since does not hold.
        assert kind.held(folder) == COUNT and (not kind.adds or kind.asked[-1] >= (complete or 0))


@contextmanager
def no_room_at_sync(calls: int) -> Iterator[None]:
    """The system says so when it is to have bytes on the disk."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with mock.patch.object(os, "fsync", side_effect=itertools.chain([None] * calls, itertools.repeat(full))):
        yield


@pytest.mark.parametrize("full", [no_file_above, no_room_at_sync])
def test_on_a_full_disk_the_old_stays_whole(full, case, tmp_path):
    kind, root, before = case
    state = {file.name: file.read_bytes() for file in root.iterdir()}
    kind.write(written(state, tmp_path / "more"))
    largest = max(len(each) for name, each in contents(tmp_path / "more").items() if state.get(name) != each)
    failed = 0
    for number in (0, largest // 3, 2 * largest // 3, largest - 1) if full is no_file_above else range(0, 50, 11):
        folder = written(state, tmp_path / str(number))
        try:
            with full(number):
                kind.write(folder)
        except OSError as error:
            assert str(folder) in str(error) and "\n" not in str(error)
            failed += 1
            assert kind.held(folder) in ([before] if full is no_file_above else [before, COUNT])
        kind.write(folder)
        assert kind.held(folder) == COUNT
    assert failed == 4 if full is no_file_above else failed


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.goes_on])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, ValueError])
def test_after_an_error_the_same_call_goes_on(error, name, tmp_path):
    kind, new = KINDS[name], tmp_path / "new"
    kind.asked.clear()
    for fail_at in (BEFORE, BEFORE, COUNT - 2):
        interrupted(kind, new, fail_at, mock.Mock(side_effect=error("the encoder fails")))
        assert kind.held(new) is None
    kind.write(new)
    # A batch that begins before the number is written.
    assert kind.asked == [kind.kept_in * (written // kind.kept_in) for written in (0, 16, 16, 28)]
    kind.write(tmp_path / "whole")
    assert contents(new) == contents(tmp_path / "whole")


@pytest.mark.process
@pytest.mark.parametrize("name", [pytest.param("residual", marks=pytest.mark.smoke), "sparse"])
def test_a_process_that_is_killed_loses_no_finished_block(name, tmp_path):
    kind, folder = KINDS[name], tmp_path / "new"
    code = (
        "import os, pathlib, pytest, signal, sys\n"
        "from tests.support.stored import KINDS, shrink\n"
        "shrink(pytest.MonkeyPatch())\n"
        "fail = lambda: os.kill(os.getpid(), signal.SIGKILL)\n"
        "KINDS[sys.argv[1]].write(pathlib.Path(sys.argv[2]), fail_at=int(sys.argv[3]), fail=fail)\n"
    )
    for fail_at in (12, 24):
        done = subprocess.run([sys.executable, "-c", code, name, str(folder), str(fail_at)], timeout=120)
        assert done.returncode == -signal.SIGKILL and kind.held(folder) is None
    kind.write(folder)
    assert kind.asked[-1] == 24 and kind.held(folder) == COUNT
    kind.write(tmp_path / "whole")
    assert contents(folder) == contents(tmp_path / "whole")


def test_readers_beside_a_writer_see_one_generation(kind, tmp_path):
    kind.write(tmp_path, 5)
    ended = threading.Event()

    def read() -> list[int | None]:
        found = []
        while not ended.is_set():
            found.append(kind.held(tmp_path))
        return found

    with ThreadPoolExecutor(3) as readers, ExitStack() as last:
        last.callback(ended.set)
        reading = [readers.submit(read) for _ in range(3)]
        for end in range(5, COUNT + 1, 2):
            kind.write(tmp_path, end)
            ended.wait(0.02)
    found = [count for each in reading for count in each.result()]
    assert len(found) > 5 and len(set(found)) > 1 and None not in found
    assert kind.held(tmp_path) == COUNT


def test_what_is_open_stays_while_others_write(kind, tmp_path):
    kind.write(tmp_path, BEFORE)
    opened = kind.open(tmp_path)
    kind.write(tmp_path)
    assert kind.checked(opened) == BEFORE and kind.held(tmp_path) == COUNT
