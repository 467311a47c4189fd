import random
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from accelerate import PartialState

from pylate_fastmaxsim.recipes.mining.mine import CARD, OWN_FILES, SUMMARY_FILE, mine, put_into_place
from pylate_fastmaxsim.recipes.mining.resumable import Work, read_part
from pylate_fastmaxsim.reporting import progress
from tests.support.case_tables import case_table
from tests.support.mining_recipe import answers, mine_but_stop, parts_written, same_data, write_pairs
from tests.support.power_cut import states, written
from tests.support.saved_models import SPARSE


def parts(stages: str) -> list[str]:
    """The stage of each part, where ``search*3`` are three parts of the search."""
    counted = (stage.split("*") for stage in stages.split())
    return [name for name, count in counted for _ in range(int(count))]


@pytest.fixture
def recipe(recipe, saved, teacher, tmp_path):
    """``recipe(*overrides)``, in which SPARSE stands for a sparse model and OTHER for another teacher."""

    def made(*overrides: str):
        other = shutil.copytree(teacher, tmp_path / "other", dirs_exist_ok=True)
        return recipe(*(each.replace("SPARSE", saved(SPARSE)).replace("OTHER", str(other)) for each in overrides))

    return made


@case_table("""
override | stages | stage | after
| search*3 positives*5 teacher*5 | search | 2
| search*3 positives*5 teacher*5 | teacher | 2
mining.first_stage={kind: sparse, k: 16, model: SPARSE} | sparse*3 candidates*2 search*3 positives*5 teacher*5 | candidates | 1
mining.first_stage={kind: sparse, k: 16, model: SPARSE} | sparse*3 candidates*2 search*3 positives*5 teacher*5 | search | 1
mining.corpus_format=residual-2 | codec*1 search*3 positives*5 teacher*5 | search | 1
""")
def test_an_interrupted_run_ends_the_same(override, stages, stage, after, recipe, tmp_path, monkeypatch, capsys):
    overrides = [override] if override else []
    mine(recipe(*overrides, f"data.name={tmp_path / 'whole'}"))
    mine_but_stop(recipe(*overrides), stage, int(after), monkeypatch)
    assert not (tmp_path / "mined").exists()
    capsys.readouterr()
    monkeypatch.setattr(progress, "LINE_SECONDS", 0)
    stages = parts(stages)
    assert parts_written(recipe(*overrides), monkeypatch) == stages[stages.index(stage) + int(after) :]
    if not overrides:  # the progress begins where the first run stopped, after two parts
        title, first = ("Searching", 30) if stage == "search" else ("Asking the teacher", 18)
        bars = [line for line in re.split("[\r\n]", capsys.readouterr().err) if line.startswith(title)]
        assert f" {first}" in bars[0].split("|")[2] and "100%" in bars[-1]
    assert same_data(tmp_path / "whole", tmp_path / "mined")


# What was mined with, what changes, the stages that are computed again after two parts of the teacher, and what is said.
@case_table("""
before | override | again | said
| mining.batch_size=2 | teacher*3 |
| mining.teacher=OTHER | teacher*5 | 2 finished parts of the stage teacher .* these changed: mining.teacher.
| mining.range_max=14 | search*3 teacher*3 | 3 finished parts of the stage search .*: mining.range_max.
| model.query_length=10 | search*3 positives*5 teacher*5 | 5 finished parts .* positives .*: model.
| PAIRS | search*3 positives*5 teacher*5 | 3 finished parts of the stage search .*: mining.pairs or
| mining.corpus_format=int8 | search*3 positives*5 teacher*3 | stage search .*: mining.corpus_format.
| mining.pool_factor=2 | search*3 positives*5 teacher*5 | stage search .*: mining.pool_factor.
mining.first_stage={kind: bm25, k: 16} | mining.first_stage={kind: bm25, k: 17} | candidates*2 search*3 teacher*5
    | stage candidates .*: mining.first_stage.
mining.first_stage={kind: bm25, k: 16} | mining.first_stage={kind: sparse, k: 16, model: SPARSE}
    | sparse*3 candidates*2 search*3 teacher*5 | stage sparse .*: mining.first_stage, model.
mining.first_stage={kind: bm25, k: 16} | mining.first_stage=null | search*3 teacher*5
    | search .*: the candidates of mining.first_stage.
""")
def test_changed_settings_keep_the_rest(before, override, again, said, recipe, tmp_path, monkeypatch, caplog):
    overrides = [before] if before else []
    mine_but_stop(recipe(*overrides), "teacher", 2, monkeypatch)
    caplog.clear()
    overrides.append(override)
    if override == "PAIRS":  # other texts under the same name
        overrides = []
        shutil.rmtree(tmp_path / "pairs")
        write_pairs(tmp_path / "pairs", answers("another "))
    assert parts_written(recipe(*overrides), monkeypatch) == parts(again)
    messages = "\n".join(message for message in caplog.messages if message.startswith("mining: "))
    assert re.search(f"{said}", messages) if said else not messages
    if override != "mining.batch_size=2":  # other batches round otherwise
        mine(recipe(*overrides, f"data.name={tmp_path / 'whole'}"))
        assert same_data(tmp_path / "mined", tmp_path / "whole")


def search_parts(folder, seed=0) -> tuple[list, list[int]]:
    """Files of two parts, and the beginnings of those that were computed."""
    computed = []

    def compute(part, bar):
        computed.append(part.start)
        return seed + np.arange(part.start, part.stop)

    work = Work(folder, PartialState(), SimpleNamespace(rows_per_part=5))
    files = work.parts("search", {"seed": seed}, "", "", 10, "rows_per_part", compute)
    assert np.concatenate(list(map(read_part, files))).tolist() == list(range(seed, seed + 10))
    return files, computed


@pytest.mark.parametrize("name", ["search-0000000005.npz", "settings-search.json"])
def test_a_flipped_bit_is_never_another_number(name, tmp_path, caplog):
    search_parts(tmp_path)
    whole, draw = (tmp_path / name).read_bytes(), random.Random(0)
    for _ in range(100):
        flipped = bytearray(whole)
        flipped[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        (tmp_path / name).write_bytes(flipped)
        search_parts(tmp_path)  # compares what it reads
        (tmp_path / name).write_bytes(whole)
    assert "is damaged, so it is computed again" in caplog.text or name.startswith("settings")
    (tmp_path / name).write_bytes(whole[:-30])
    assert search_parts(tmp_path)[1] == ([5] if name.endswith("npz") else [0, 5])


def test_kills_and_power_cuts_leave_parts_that_work_goes_on_with(tmp_path):
    root = written({}, tmp_path / "root")
    search_parts(root, seed=0)
    for number, (_, state) in enumerate(states(root, lambda: search_parts(root, seed=7), cuts=10)):
        search_parts(written(state, tmp_path / str(number)), seed=7)


@pytest.mark.parametrize("first", [True, False])
def test_kills_and_power_cuts_never_show_new_data_that_are_not_whole(first, tmp_path):
    new = {name: f"new {name}".encode() for name in OWN_FILES}
    old = {} if first else {name: f"old {name}".encode() for name in OWN_FILES if name != SUMMARY_FILE}
    before = {f"unfinished/data/{name}": content for name, content in new.items()}
    before |= {f"mined/{name}": content for name, content in old.items()}
    before |= dict.fromkeys(("unfinished", "unfinished/data", *(() if first else ("mined",))))
    root = written(before, tmp_path / "root")
    found = states(root, lambda: put_into_place(root / "unfinished/data", root / "mined", not first), cuts=10)
    for _, state in found:
        tables = {name: state.get(f"mined/{name}") for name in OWN_FILES if name != CARD}
        if tables[SUMMARY_FILE] is not None:  # complete, as its file says
            assert tables == {name: new[name] for name in tables}
        elif tables["train.parquet"] is not None:  # can be trained on
            assert tables in [{name: each.get(name) for name in tables} for each in (old, new | {SUMMARY_FILE: None})]
