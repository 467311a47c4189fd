import re
import shutil

import pytest

from pylate_fastmaxsim.recipes.mining.mine import mine
from pylate_fastmaxsim.reporting import progress
from tests.support.case_tables import case_table
from tests.support.mining_recipe import answers, mine_but_stop, parts_written, same_data, write_pairs
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
