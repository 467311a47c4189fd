"""Interrupted mining goes on: nothing is computed twice, and changed settings keep what they do not concern."""

from __future__ import annotations

import re
import shutil

import pytest

from pylate_fastmaxsim.recipes.mining import mine as mining_mine
from tests.support.mining_recipe import (
    POSITIVES,
    SEARCH,
    TEACHER,
    answers,
    mine_but_stop,
    parts_written,
    recipe_for,
    same_data,
    write_pairs,
)


@pytest.mark.parametrize("stage", ["search", "teacher"])
def test_an_interrupted_run_goes_on_and_ends_the_same(stage, encoder, teacher, tmp_path, monkeypatch, capsys):
    mining_mine.mine(recipe_for(tmp_path, encoder("modernbert"), teacher, f"data.name={tmp_path / 'whole'}"))
    recipe = recipe_for(tmp_path, encoder("modernbert"), teacher)
    mine_but_stop(recipe, stage, 2, monkeypatch)
    assert not (tmp_path / "mined").exists()
    capsys.readouterr()
    expected = [*SEARCH, *POSITIVES, *TEACHER][2:] if stage == "search" else TEACHER[2:]
    assert parts_written(recipe, monkeypatch) == expected
    # The bar begins where the first run stopped, after two parts.
    title, first = ("Searching", 30) if stage == "search" else ("Asking the teacher", 18)
    bars = [line for line in re.split("[\r\n]", capsys.readouterr().err) if line.startswith(title)]
    assert f" {first}" in bars[0].split("|")[2] and "100%" in bars[-1]
    assert same_data(tmp_path / "whole", tmp_path / "mined")


@pytest.mark.parametrize(
    ("override", "again", "said"),
    [
        ("mining.batch_size=2", TEACHER[2:], None),
        ("mining.teacher=OTHER", TEACHER, "2 finished parts of the stage teacher .* these changed: mining.teacher."),
        ("mining.range_max=14", [*SEARCH, *TEACHER[2:]], "3 finished parts of the stage search .*: mining.range_max."),
        ("model.query_length=10", [*SEARCH, *POSITIVES, *TEACHER], "5 finished parts .* positives .*: model."),
        ("PAIRS", [*SEARCH, *POSITIVES, *TEACHER], "3 finished parts of the stage search .*: mining.pairs or"),
    ],
)
def test_changed_settings_keep_what_they_do_not_concern(
    override, again, said, encoder, teacher, tmp_path, monkeypatch, caplog
):
    mine_but_stop(recipe_for(tmp_path, encoder("modernbert"), teacher), "teacher", 2, monkeypatch)
    caplog.clear()
    overrides = [override.replace("OTHER", shutil.copytree(teacher, f"{tmp_path}/other"))]
    if override == "PAIRS":  # other texts under the same name
        overrides = []
        shutil.rmtree(tmp_path / "pairs")
        write_pairs(tmp_path / "pairs", answers("another "))
    changed = recipe_for(tmp_path, encoder("modernbert"), teacher, *overrides)
    assert parts_written(changed, monkeypatch) == again
    messages = "\n".join(message for message in caplog.messages if message.startswith("mining: "))
    assert re.search(said, messages) if said else not messages
    if override != "mining.batch_size=2":  # other batches round otherwise
        whole = f"data.name={tmp_path / 'whole'}"
        mining_mine.mine(recipe_for(tmp_path, encoder("modernbert"), teacher, *overrides, whole))
        assert same_data(tmp_path / "mined", tmp_path / "whole")
