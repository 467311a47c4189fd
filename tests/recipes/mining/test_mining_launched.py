"""Mining by two processes is mining by one: the same bytes, each part computed once, no hanging on an error."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from paths import SUPPORT

pytest.importorskip("datasets")
pytest.importorskip("pylate")

import torch
import yaml
from test_mining import recipe_for, teacher  # noqa: F401  (a fixture)

from pylate_fastmaxsim.recipes.files.lock import only_command
from pylate_fastmaxsim.recipes.mining import mine as mining_mine
from pylate_fastmaxsim.recipes.mining import resumable

MINED = SUPPORT / "mined.py"


@pytest.fixture(autouse=True)
def _as_launchers_set_it():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def recipe(tmp_path, encoder, teacher):  # noqa: F811
    recipe = recipe_for(tmp_path, encoder("modernbert"), teacher)
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(asdict(recipe)))
    mining_mine.mine(recipe_for(tmp_path, encoder("modernbert"), teacher, f"data.name={tmp_path / 'whole'}"))
    return recipe


def two_processes(folder: Path, failing: str) -> subprocess.CompletedProcess:
    """What ``accelerate launch`` starts, on a port that nothing else can take before it is used."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    # Where the second fails, the first would wait for it for 30 minutes.
    return subprocess.run([*command, str(MINED), str(folder), failing], capture_output=True, text=True, timeout=300)


def assert_same(folder: Path) -> None:
    for name in ("train", "queries", "documents"):
        whole, mined = (folder / part / f"{name}.parquet" for part in ("whole", "mined"))
        assert whole.read_bytes() == mined.read_bytes()
    summaries = [json.loads((folder / part / "mining.json").read_text()) for part in ("whole", "mined")]
    for summary in summaries:
        del summary["data"]
    assert summaries[0] == summaries[1]
    assert not (folder / "mined.unfinished").exists()


def stages(written: list[str]) -> list[str]:
    """Of which stages the parts are that were written."""
    return [name.partition("-")[0] for name in written if not name.startswith("settings")]


def test_one_process_begins_and_two_go_on(recipe, tmp_path, monkeypatch):
    write = resumable.write_whole

    def interrupting(file, writer):
        write(file, writer)
        if file.name.startswith("search"):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(resumable, "write_whole", interrupting)
        with pytest.raises(KeyboardInterrupt):
            mining_mine.mine(recipe)
    (first,) = (tmp_path / "mined.unfinished").glob("search-*")
    done = two_processes(tmp_path, "nothing")
    assert done.returncode == 0, done.stderr[-3000:]
    assert_same(tmp_path)
    ours, theirs = (json.loads((tmp_path / f"written-{rank}.json").read_text()) for rank in (0, 1))
    # Two parts of the search, five of the positives and five of the teacher are left.
    assert stages(ours) == ["search", *["positives"] * 3, *["teacher"] * 3]
    assert stages(theirs) == ["search", *["positives"] * 2, *["teacher"] * 2]
    assert not set(ours) & set(theirs) and first.name not in ours + theirs
    assert done.stdout.count("pairs without enough negatives") == 1
    assert "Searching (process 1 of 2)" in done.stderr and "(process 2 of 2)" not in done.stderr
    assert done.stderr.count("Asking the teacher (process 1 of 2): 100%") >= 1


def test_the_parts_stay_until_both_have_read_them(recipe, tmp_path):
    done = two_processes(tmp_path, "late")
    assert done.returncode == 0, done.stderr
    assert_same(tmp_path)


def test_two_processes_are_refused_while_another_command_mines(recipe, tmp_path):
    unfinished = tmp_path / "mined.unfinished"
    with only_command("data.name", unfinished, mining_mine.LOCK_FILE, ""):
        refused = two_processes(tmp_path, "nothing")
        assert [path.name for path in unfinished.iterdir()] == ["lock"]
    assert refused.returncode != 0 and refused.stderr.count("mined is being mined by another command; wait until") == 1
    assert not unfinished.exists() and not (tmp_path / "mined").exists()


def test_machines_that_share_no_disk_are_refused(recipe, tmp_path):
    refused = two_processes(tmp_path, "apart")
    assert refused.returncode != 0
    for name in ("mined", "apart"):
        output = tmp_path / name
        assert (
            f"data.name: {output} must be on a disk that all machines share, but not all processes find {output}.unfinished "
            "there." in refused.stderr
        ), refused.stderr[-3000:]
        assert not output.with_name(f"{name}.unfinished").exists()


def test_where_one_of_two_fails_the_other_ends_and_nothing_is_lost(recipe, tmp_path):
    done = two_processes(tmp_path, "teacher")
    assert done.returncode != 0 and "the second process is broken" in done.stderr, done.stderr[-3000:]
    kept = {file: file.stat().st_mtime_ns for file in (tmp_path / "mined.unfinished").glob("[spt]*-*.np[yz]")}
    written = json.loads((tmp_path / "written-1.json").read_text())
    assert stages(written) == ["search", "positives", "positives", "teacher"]
    assert set(written) <= {file.name for file in kept} and len(kept) >= 5
    seen = {}
    write_data = mining_mine.write_data

    def noting(folder, *args):
        seen.update({file: file.stat().st_mtime_ns for file in kept})
        write_data(folder, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mining_mine, "write_data", noting)
        mining_mine.mine(recipe)
    assert seen == kept
    assert_same(tmp_path)
