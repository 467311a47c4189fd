"""Interrupted mining goes on: nothing is computed twice, and changed settings keep what they do not concern."""

import re
import shutil

import pytest

from pylate_fastmaxsim.recipes.mining.mine import mine
from tests.support.mining_recipe import (
    POSITIVES,
    SEARCH,
    TEACHER,
    answers,
    mine_but_stop,
    parts_written,
    same_data,
    write_pairs,
)
from tests.support.saved_models import SPARSE as SPARSE_MODEL

SPARSE, CANDIDATES = ["sparse"] * 3, ["candidates"] * 2  # of 40 documents, 15 in each, and of QN queries, 9 in each
BM25, SPARSE_STAGE = "mining.first_stage={kind: bm25, k: 16}", "mining.first_stage={kind: sparse, k: 16, model: SPARSE}"
WITH_STAGE = [*SPARSE, *CANDIDATES, *SEARCH, *POSITIVES, *TEACHER]


@pytest.fixture
def recipe(recipe, saved, teacher, tmp_path):
    """``recipe(*overrides)``, in which SPARSE stands for a sparse model and OTHER for another teacher."""

    def made(*overrides: str):
        if any("OTHER" in each for each in overrides):
            shutil.copytree(teacher, tmp_path / "other", dirs_exist_ok=True)
        names = {"SPARSE": saved(SPARSE_MODEL), "OTHER": str(tmp_path / "other")}
        return recipe(*(re.sub("SPARSE|OTHER", lambda name: names[name[0]], each) for each in overrides))

    return made


@pytest.mark.parametrize(
    ("overrides", "stages", "stage", "after"),
    [
        ([], [*SEARCH, *POSITIVES, *TEACHER], "search", 2),
        ([], [*SEARCH, *POSITIVES, *TEACHER], "teacher", 2),
        ([SPARSE_STAGE], WITH_STAGE, "candidates", 1),
        ([SPARSE_STAGE], WITH_STAGE, "search", 1),
        (["mining.corpus_format=residual-2"], ["codec", *SEARCH, *POSITIVES, *TEACHER], "search", 1),
    ],
)
def test_an_interrupted_run_goes_on_and_ends_the_same(
    overrides, stages, stage, after, recipe, tmp_path, monkeypatch, capsys
):
    mine(recipe(*overrides, f"data.name={tmp_path / 'whole'}"))
    mine_but_stop(recipe(*overrides), stage, after, monkeypatch)
    assert not (tmp_path / "mined").exists()
    capsys.readouterr()
    assert parts_written(recipe(*overrides), monkeypatch) == stages[stages.index(stage) + after :]
    if not overrides:  # the bar begins where the first run stopped, after two parts
        title, first = ("Searching", 30) if stage == "search" else ("Asking the teacher", 18)
        bars = [line for line in re.split("[\r\n]", capsys.readouterr().err) if line.startswith(title)]
        assert f" {first}" in bars[0].split("|")[2] and "100%" in bars[-1]
    assert same_data(tmp_path / "whole", tmp_path / "mined")


@pytest.mark.parametrize(
    ("before", "override", "again", "said"),
    [
        ([], "mining.batch_size=2", TEACHER[2:], None),
        (
            [],
            "mining.teacher=OTHER",
            TEACHER,
            "2 finished parts of the stage teacher .* these changed: mining.teacher.",
        ),
        (
            [],
            "mining.range_max=14",
            [*SEARCH, *TEACHER[2:]],
            "3 finished parts of the stage search .*: mining.range_max.",
        ),
        ([], "model.query_length=10", [*SEARCH, *POSITIVES, *TEACHER], "5 finished parts .* positives .*: model."),
        ([], "PAIRS", [*SEARCH, *POSITIVES, *TEACHER], "3 finished parts of the stage search .*: mining.pairs or"),
        (
            [],
            "mining.corpus_format=int8",
            [*SEARCH, *POSITIVES, *TEACHER[2:]],
            "stage search .*: mining.corpus_format.",
        ),
        (
            [BM25],
            f"{BM25[:-3]}17}}",
            [*CANDIDATES, *SEARCH, *TEACHER],
            "stage candidates .*: mining.first_stage.",
        ),
        (
            [BM25],
            SPARSE_STAGE,
            [*SPARSE, *CANDIDATES, *SEARCH, *TEACHER],
            "stage sparse .*: mining.first_stage, model.",
        ),
        ([BM25], "mining.first_stage=null", [*SEARCH, *TEACHER], "search .*: the candidates of mining.first_stage."),
    ],
)
def test_changed_settings_keep_what_they_do_not_concern(
    before, override, again, said, recipe, tmp_path, monkeypatch, caplog
):
    mine_but_stop(recipe(*before), "teacher", 2, monkeypatch)
    caplog.clear()
    overrides = [*before, override]
    if override == "PAIRS":  # other texts under the same name
        overrides = []
        shutil.rmtree(tmp_path / "pairs")
        write_pairs(tmp_path / "pairs", answers("another "))
    assert parts_written(recipe(*overrides), monkeypatch) == again
    messages = "\n".join(message for message in caplog.messages if message.startswith("mining: "))
    assert re.search(f"{said}", messages) if said else not messages
    if override != "mining.batch_size=2":  # other batches round otherwise
        mine(recipe(*overrides, f"data.name={tmp_path / 'whole'}"))
        assert same_data(tmp_path / "mined", tmp_path / "whole")
