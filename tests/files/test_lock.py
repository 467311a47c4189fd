import multiprocessing
import os
import time
from pathlib import Path

import pytest
from filelock import FileLock

from pylate_fastmaxsim.files.lock import HeldError, locked

HELD = "is being written by another process"


def enter(folder: Path, until: float, entries) -> None:
    """Take the lock again and again; count how often, and how often another process was inside as well."""
    mine = twice = 0
    while time.monotonic() < until:
        try:
            with locked(folder, HELD):
                mine += 1
                try:
                    os.close(os.open(folder / "inside", os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    twice += 1
                else:
                    os.unlink(folder / "inside")
        except HeldError:
            pass
    entries.put((mine, twice))


def test_two_processes_are_never_inside_at_once(tmp_path):
    context = multiprocessing.get_context("fork")
    entries, until = context.Queue(), time.monotonic() + 1
    processes = [context.Process(target=enter, args=(tmp_path, until, entries)) for _ in range(3)]
    for process in processes:
        process.start()
    found = [entries.get() for _ in processes]
    for process in processes:
        process.join()
    assert sum(mine for mine, _ in found) > 100 and sum(twice for _, twice in found) == 0


def test_a_lock_that_is_held_or_cannot_be_taken(tmp_path, monkeypatch):
    with locked(tmp_path, HELD), pytest.raises(HeldError, match=HELD), locked(tmp_path, HELD):
        pass
    with locked(tmp_path, HELD):  # released
        pass
    assert os.listdir(tmp_path) == ["lock"]
    (tmp_path / "lock").unlink()
    (tmp_path / "lock").mkdir()
    with pytest.raises(ValueError, match="lock cannot be locked"), locked(tmp_path, HELD):
        pass


@pytest.mark.parametrize("made_again", [False, True])
def test_a_lock_file_that_was_removed_meanwhile_is_no_lock(made_again, tmp_path, monkeypatch):
    class Late(FileLock):
        def acquire(self, *args, **kwargs):
            acquired = super().acquire(*args, **kwargs)
            (tmp_path / "lock").unlink()
            if made_again:
                (tmp_path / "lock").touch()
            return acquired

    monkeypatch.setattr("pylate_fastmaxsim.files.lock.FileLock", Late)
    with pytest.raises(HeldError, match=HELD), locked(tmp_path, HELD):
        pass
