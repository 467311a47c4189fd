import os
import stat
from pathlib import Path

import pytest

from pylate_fastmaxsim.files import replace
from pylate_fastmaxsim.files.replace import SCRATCH, remove_scratch, replace_file, replace_folder
from tests.support.full_disk import no_file_above
from tests.support.power_cut import states, written


def seen(folder: Path) -> dict[str, str]:
    files = (file for file in sorted(folder.rglob("*")) if file.is_file() and SCRATCH not in str(file))
    return {str(file.relative_to(folder)): file.read_text() for file in files}


def write_new(folder: Path) -> None:
    folder.mkdir()
    (folder / "a").write_text("new")
    (folder / "inside").mkdir()
    (folder / "inside" / "b").write_text("new")


WRITERS = {
    "bytes": lambda root: replace_file(root / "file", b"new"),
    "function": lambda root: replace_file(root / "file", lambda name: Path(name).write_text("new")),
    "folder": lambda root: replace_folder(root / "folder", write_new),
}
NEW = {"bytes": {"file": "new"}, "function": {"file": "new"}, "folder": {"folder/a": "new", "folder/inside/b": "new"}}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("old", [False, True])
def test_the_old_or_the_new_is_there_whole(writer, old, tmp_path):
    before = {}
    if old:
        before = {"folder/a": "old", "folder/c": "old"} if writer == "folder" else {"file": "old"}
    content = {name: text.encode() for name, text in before.items()}
    root = written(content | ({"folder": None} if old and writer == "folder" else {}), tmp_path / "root")
    found = states(root, lambda: WRITERS[writer](root), cuts=20)
    assert seen(root) == NEW[writer] and not list(root.glob(f"{SCRATCH}*"))
    assert {kind for kind, _ in found} == {"kill", "cut", "end"}
    for number, (kind, state) in enumerate(found):
        left = written(state, tmp_path / str(number))
        assert seen(left) in ([NEW[writer]] if kind == "end" else [before, NEW[writer]])
        remove_scratch(left)
        assert not list(left.glob(f"{SCRATCH}*"))


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("size", [0, 1, 2])
def test_a_full_disk_leaves_the_old_one(writer, size, tmp_path):
    old = {"folder/a": "old", "folder/c": "old"} if writer == "folder" else {"file": "old"}
    (tmp_path / "folder").mkdir()
    for name, text in old.items():
        (tmp_path / name).write_text(text)
    with no_file_above(size), pytest.raises(OSError, match="File too large"):
        WRITERS[writer](tmp_path)
    assert seen(tmp_path) == old and not list(tmp_path.rglob(f"{SCRATCH}*"))


def test_without_an_exchange_a_folder_is_replaced_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(replace.ctypes, "CDLL", lambda *_, **__: object())
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "c").write_text("old")
    replace_folder(tmp_path / "folder", write_new)
    assert seen(tmp_path) == NEW["folder"] and os.listdir(tmp_path) == ["folder"]


def test_a_writer_that_fails_changes_nothing(tmp_path):
    def fails(name):
        Path(name).unlink(missing_ok=True)
        Path(name).mkdir()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replace_folder(tmp_path / "target", fails)
    with pytest.raises(UnicodeEncodeError):
        replace_file(tmp_path / "target", lambda name: Path(name).write_text("\ud800", encoding="utf-8"))
    assert os.listdir(tmp_path) == []


def test_what_is_no_file_is_not_replaced(tmp_path):
    (tmp_path / "real").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name, what in (("link", "a link"), ("pipe", "no regular file"), ("folder", "a folder")):
        with pytest.raises(ValueError, match=f"{name} must be a file that can be replaced, .* but it is {what}"):
            replace_file(tmp_path / name, b"new")
    with pytest.raises(ValueError, match="link must be a folder"):
        replace_folder(tmp_path / "link", write_new)
    assert (tmp_path / "real").read_text() == "kept" and len(os.listdir(tmp_path)) == 4


def test_others_may_read_it_and_its_name_may_be_as_long_as_names_get(tmp_path):
    before = os.umask(0o022)
    try:
        replace_file(tmp_path / ("n" * 255), b"new")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / ("n" * 255)).stat().st_mode) == 0o644
