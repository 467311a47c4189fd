"""Mining by two processes is mining by one: the same bytes, each part computed once, no hanging on an error."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pylate_fastmaxsim.recipes.mining import mine as mining_mine
from tests.support.mining_recipe import mine_but_stop, recipe_for, same_data, written_to
from tests.support.paths import SUPPORT

pytestmark = pytest.mark.process


@pytest.fixture
def recipe(tmp_path, encoder, teacher):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as launchers set it
    recipe = recipe_for(tmp_path, encoder("modernbert"), teacher)
    written_to(tmp_path, recipe)
    mining_mine.mine(recipe_for(tmp_path, encoder("modernbert"), teacher, f"data.name={tmp_path / 'whole'}"))
    yield recipe
    torch.set_num_threads(threads)


def two_processes(folder: Path, failing: str) -> subprocess.CompletedProcess:
    """What ``accelerate launch`` starts, on a port that nothing else can take before it is used."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    # Where the second fails, the first would wait for it for 30 minutes.
    command += [str(SUPPORT / "mined.py"), str(folder), failing]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def stages(written: list[str]) -> list[str]:
    """Of which stages the parts are that were written."""
    return [name.partition("-")[0] for name in written if not name.startswith("settings")]


def test_one_process_begins_and_two_go_on(recipe, tmp_path, monkeypatch):
    (first,) = mine_but_stop(recipe, "search", 1, monkeypatch)
    done = two_processes(tmp_path, "late")  # the second reads late what the first would remove
    assert done.returncode == 0, done.stderr[-3000:]
    assert same_data(tmp_path / "whole", tmp_path / "mined") and not (tmp_path / "mined.unfinished").exists()
    ours, theirs = (json.loads((tmp_path / f"written-{rank}.json").read_text()) for rank in (0, 1))
    # Two parts of the search, five of the positives and five of the teacher are left.
    assert stages(ours) == ["search", *["positives"] * 3, *["teacher"] * 3]
    assert stages(theirs) == ["search", *["positives"] * 2, *["teacher"] * 2]
    assert not set(ours) & set(theirs) and first not in ours + theirs
    assert done.stdout.count("pairs without enough negatives") == 1
    assert "Searching (process 1 of 2)" in done.stderr and "(process 2 of 2)" not in done.stderr


def test_with_a_first_stage_two_processes_mine_what_one_does(recipe, encoder, teacher, tmp_path):
    stage = "mining.first_stage={kind: bm25, k: 16}"
    recipe = recipe_for(tmp_path, encoder("modernbert"), teacher, stage)
    mining_mine.mine(replace(recipe, data=replace(recipe.data, name=str(tmp_path / "one"))))
    written_to(tmp_path, recipe)
    done = two_processes(tmp_path, "nowhere")
    assert done.returncode == 0, done.stderr[-3000:]
    assert same_data(tmp_path / "one", tmp_path / "mined") and not same_data(tmp_path / "one", tmp_path / "whole")
    ours, theirs = (json.loads((tmp_path / f"written-{rank}.json").read_text()) for rank in (0, 1))
    assert stages(ours)[:5] == ["sparse", "sparse", "candidates", "search", "search"]
    assert stages(theirs)[:3] == ["sparse", "candidates", "search"] and not set(ours) & set(theirs)


def test_two_processes_compress_with_one_codec(recipe, encoder, teacher, tmp_path):
    recipe = recipe_for(tmp_path, encoder("modernbert"), teacher, "mining.corpus_format=residual-1")
    mining_mine.mine(replace(recipe, data=replace(recipe.data, name=str(tmp_path / "one"))))
    written_to(tmp_path, recipe)
    done = two_processes(tmp_path, "nowhere")
    assert done.returncode == 0, done.stderr[-3000:]
    assert same_data(tmp_path / "one", tmp_path / "mined") and not same_data(tmp_path / "one", tmp_path / "whole")
    ours, theirs = (json.loads((tmp_path / f"written-{rank}.json").read_text()) for rank in (0, 1))
    assert stages(ours)[:3] == ["codec", "search", "search"] and stages(theirs)[0] == "search"
    assert not set(ours) & set(theirs)


def test_machines_that_share_no_disk_are_refused(recipe, tmp_path):
    refused = two_processes(tmp_path, "apart")
    assert refused.returncode != 0
    for name in ("mined", "apart"):
        output = tmp_path / name
        said = f"data.name: {output} must be on a disk that all machines share"
        assert said in refused.stderr, refused.stderr[-3000:]
        assert not output.with_name(f"{name}.unfinished").exists()


def test_where_one_of_two_fails_the_other_ends_and_nothing_is_lost(recipe, tmp_path, monkeypatch):
    done = two_processes(tmp_path, "teacher")
    assert done.returncode != 0 and "the second process is broken" in done.stderr, done.stderr[-3000:]
    kept = {file: file.stat().st_mtime_ns for file in (tmp_path / "mined.unfinished").glob("[spt]*-*.np[yz]")}
    written = json.loads((tmp_path / "written-1.json").read_text())
    assert stages(written) == ["search", "positives", "positives", "teacher"]
    assert set(written) <= {file.name for file in kept} and len(kept) >= 5
    seen, write_data = {}, mining_mine.write_data

    def noting(folder, *args):
        seen.update({file: file.stat().st_mtime_ns for file in kept})
        write_data(folder, *args)

    monkeypatch.setattr(mining_mine, "write_data", noting)
    mining_mine.mine(recipe)
    assert seen == kept and same_data(tmp_path / "whole", tmp_path / "mined")
