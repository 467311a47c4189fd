import os

import pytest
from filelock import FileLock

from pylate_fastmaxsim.files.lock import HeldError, locked

HELD = "is being written by another process"


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
