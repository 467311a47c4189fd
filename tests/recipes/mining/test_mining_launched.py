"""Mining by two processes is mining by one: the same bytes, each part computed once, no hanging on an error."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pylate_fastmaxsim.recipes.mining import mine as mining_mine
from tests.support.case_tables import case_table
from tests.support.mining_recipe import mine_but_stop, same_data, written_to
from tests.support.paths import SUPPORT

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("forked")]


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as launchers set it
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def whole(recipe, tmp_path) -> Path:
    mining_mine.mine(recipe(f"data.name={tmp_path / 'whole'}"))
    return tmp_path / "whole"


def two_processes(recipe, folder: Path, failing: str) -> tuple[subprocess.CompletedProcess, list[str], list[str]]:
    """What ``accelerate launch`` starts, and the parts that each process has written."""
    written_to(folder, recipe)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    # Where the second fails, the first would wait for it for 30 minutes.
    command += [str(SUPPORT / "mined.py"), str(folder), failing]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    files = [folder / f"written-{rank}.json" for rank in (0, 1)]
    return done, *(json.loads(file.read_text()) if file.exists() else [] for file in files)


def stages(written: list[str]) -> list[str]:
    return [name.partition("-")[0] for name in written if not name.startswith("settings")]


def test_one_process_begins_and_two_go_on(recipe, whole, tmp_path, monkeypatch):
    (first,) = mine_but_stop(recipe(), "search", 1, monkeypatch)
    # The second reads late what the first would remove.
    done, ours, theirs = two_processes(recipe(), tmp_path, "late")
    assert done.returncode == 0, done.stderr[-3000:]
    assert same_data(whole, tmp_path / "mined") and not (tmp_path / "mined.unfinished").exists()
    # Two parts of the search, five of the positives and five of the teacher are left.
    assert stages(ours) == ["search", *["positives"] * 3, *["teacher"] * 3]
    assert stages(theirs) == ["search", *["positives"] * 2, *["teacher"] * 2]
    assert not set(ours) & set(theirs) and first not in ours + theirs
    assert done.stdout.count("pairs without enough negatives") == 1
    assert "Searching (process 1 of 2)" in done.stderr and "(process 2 of 2)" not in done.stderr


@case_table("""
override | first | second
mining.first_stage={kind: bm25, k: 16} | sparse sparse candidates search search | sparse candidates search
mining.corpus_format=residual-1 | codec search search | search
""")
def test_two_processes_share_every_stage(override, first, second, recipe, whole, tmp_path):
    changed = recipe(override)
    mining_mine.mine(replace(changed, data=replace(changed.data, name=str(tmp_path / "one"))))
    done, ours, theirs = two_processes(changed, tmp_path, "nowhere")
    assert done.returncode == 0, done.stderr[-3000:]
    assert same_data(tmp_path / "one", tmp_path / "mined") and not same_data(tmp_path / "one", whole)
    for written, expected in ((ours, first.split()), (theirs, second.split())):
        assert stages(written)[: len(expected)] == expected
    assert not set(ours) & set(theirs)


def test_machines_that_share_no_disk_are_refused(recipe, tmp_path):
    refused, *_ = two_processes(recipe(), tmp_path, "apart")
    assert refused.returncode != 0
    for name in ("mined", "apart"):
        output = tmp_path / name
        said = f"data.name: {output} must be on a disk that all machines share"
        assert said in refused.stderr, refused.stderr[-3000:]
        assert not output.with_name(f"{name}.unfinished").exists()


def test_where_one_of_two_fails_the_other_ends_and_nothing_is_lost(recipe, whole, tmp_path, monkeypatch):
    done, _, written = two_processes(recipe(), tmp_path, "teacher")
    assert done.returncode != 0 and "the second process is broken" in done.stderr, done.stderr[-3000:]
    kept = {file: file.stat().st_mtime_ns for file in (tmp_path / "mined.unfinished").glob("[spt]*-*.np[yz]")}
    assert stages(written) == ["search", "positives", "positives", "teacher"]
    assert set(written) <= {file.name for file in kept} and len(kept) >= 5
    seen, write_data = {}, mining_mine.write_data

    def noting(folder, *args):
        seen.update({file: file.stat().st_mtime_ns for file in kept})
        write_data(folder, *args)

    monkeypatch.setattr(mining_mine, "write_data", noting)
    mining_mine.mine(recipe())
    assert seen == kept and same_data(whole, tmp_path / "mined")
