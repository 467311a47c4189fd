from unittest import mock

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE

from pylate_fastmaxsim import StaticLateInteraction
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.files import hold_lock
from pylate_fastmaxsim.recipes.mining import mine as mining
from pylate_fastmaxsim.recipes.mining.mine import mine
from pylate_fastmaxsim.reporting import progress
from tests.support.case_tables import case_table
from tests.support.mining_recipe import mine_but_stop, parts_written, same_data, written_to
from tests.support.recipe_runs import command
from tests.support.saved_models import SPARSE


@case_table("""
override | sentence
mining.range_max=3 | mining.range_max must be at least range_min + num_negatives, got 3, 1 and 3.
model={build: {}} | model.build does not apply to fastmaxsim mine, which searches with a model that is trained.
mining.pairs.columns=[answer, query] | mining.pairs.columns must be the query and its positive
mining.corpus={source: hub, name: a, columns: [b, c]} | mining.corpus.columns must name one column, got b, c
mining.corpus={source: hub, name: PAIRS} | mining.corpus.columns must be the text of a document, got query,
mining.max_score=-100 | mining: no query has as many negatives as mining.num_negatives
data.name=/proc/x/mined | data.name /proc/x cannot be made: No such file or directory.
mining.corpus_format=int4 | corpus_format must be one of int8, fp8, residual-1, residual-2, residual-4 or
mining.first_stage={kind: dense} | mining.first_stage.kind must be one of sparse, static, bm25, got 'dense'.
mining.first_stage={kind: bm25, k: 15}
    | mining.first_stage.k must be at least 16, mining.range_max plus the largest number of
mining.first_stage={kind: bm25, model: a/b}
    | mining.first_stage.model does not apply to mining.first_stage.kind bm25, but to sparse and static.
mining.first_stage={kind: static, model: SPARSE}
    | must be of the kind static late interaction, but it is of the kind sparse.
mining.first_stage={kind: static, model: UNFITTED}
    | UNFITTED cannot be used: it has no threshold; save it with one, or set mining.first_stage.threshold.
mining.first_stage={kind: static, model: UNFITTED, threshold: 0.5}
    | UNFITTED cannot be used: StaticLateInteraction: idf needs counts of tokens
mining.first_stage={kind: sparse} | mining.first_stage.model is missing; mining.first_stage.kind sparse needs it.
mining.first_stage={kind: sparse, model: /no/such} | mining.first_stage.model: there is no folder /no/such.
""")
def test_what_does_not_fit_is_one_sentence(override, sentence, recipe, saved, tmp_path):
    names = {"PAIRS": str(tmp_path / "pairs"), "UNFITTED": str(tmp_path / "idf"), "SPARSE": saved(SPARSE)}
    if "UNFITTED" in override:
        model = StaticLateInteraction(torch.eye(4), tokenizer=Tokenizer(BPE()), threshold="lowest", query_weights="idf")
        model.save(names["UNFITTED"])
    for name, path in names.items():
        override, sentence = override.replace(name, path), sentence.replace(name, path)
    with pytest.raises(RecipeError) as error:
        mine(recipe(override))
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_other_settings_and_other_folders_are_refused(recipe, tmp_path, monkeypatch):
    first, mined = recipe(), tmp_path / "mined"
    summary = mine(first)
    assert parts_written(first, monkeypatch) == [] and mine(first) == summary
    with pytest.raises(RecipeError, match="was mined with other settings; keep them, choose another folder, or "):
        mine(recipe("mining.range_min=0"))
    assert mine(recipe("mining.batch_size=3", "mining.documents_per_part=7", "mining.rows_per_part=50")) == summary
    # A recipe that cannot be mined removes nothing and leaves nothing.
    with pytest.raises(RecipeError, match="mining.teacher /no/such/model cannot be loaded: "):
        mine(recipe("mining.teacher=/no/such/model"), resume=False)
    assert (mined / "mining.json").exists() and not (tmp_path / "mined.unfinished").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    for name, said in (("other", "must be a folder for mining to write, but .* something else"), ("pairs", "reads")):
        with pytest.raises(RecipeError, match=f"data.name .*{said}"):
            mine(recipe(f"data.name={tmp_path / name}"), resume=False)
    (mined / "mining.json").write_text("{}")
    with pytest.raises(RecipeError, match="mining.json is damaged"):
        mine(first)


FAILURES = [
    (KeyboardInterrupt(), 130, "Interrupted: what is done is kept, and the same command goes on from there."),
    (OSError(28, "No space left on device", "x.npz"), 1, "fastmaxsim: x.npz: No space left on device; what is done"),
    (torch.OutOfMemoryError("CUDA\nMore lines."), 2, "fastmaxsim: mining.batch_size of 4 is more than fits into"),
]


def test_the_command_says_what_is_mined_and_what_is_kept(recipe, tmp_path, monkeypatch):
    file = written_to(tmp_path, recipe())
    done = command("train", file)
    assert done.exit_code == 2 and "mined is not there yet; run `fastmaxsim mine` with this recipe first" in done.stderr
    for error, exit_code, said in FAILURES:
        with mock.patch.object(mining.DocumentSearch, "lowest_positive_scores", side_effect=error):
            done = command("mine", file)
        assert done.exit_code == exit_code and done.stderr.strip().splitlines()[-1].startswith(said)
    with hold_lock("data.name", tmp_path / f"mined{mining.LOCK_ENDING}", ""):
        done = command("mine", file)
    assert done.exit_code == 2 and "mined is being mined by another command" in done.stderr
    monkeypatch.setattr(progress, "LINE_SECONDS", 0)
    done = command("mine", file)
    assert done.exit_code == 0 and "mined" in done.stdout and "Searching: 100%" in done.stderr


@pytest.mark.parametrize("stopped", [False, True])
def test_starting_over_replaces_what_mining_wrote_and_nothing_else(stopped, recipe, tmp_path, monkeypatch):
    mined, changed = tmp_path / "mined", recipe("mining.range_min=0")
    mine(recipe())
    (mined / "run").mkdir()
    own = {mined / "README.md": (mined / "README.md").read_text() + "# A card of the user\n"}
    own[mined / "run" / "notes.txt"] = "of the user"
    for path, content in own.items():
        path.write_text(content)
    before = {path.name: path.read_bytes() for path in mined.glob("*.parquet")}
    if not stopped:
        mine(changed, resume=False)
    else:
        mine_but_stop(changed, "teacher", 2, monkeypatch, resume=False)
        assert before == {path.name: path.read_bytes() for path in mined.glob("*.parquet")}
        assert not (mined / "mining.json").exists()
        assert "search" not in parts_written(changed, monkeypatch)  # it goes on
    assert {path: path.read_text() for path in own} == own
    assert {path.name for path in mined.iterdir()} == {*before, "README.md", "mining.json", "run"}
    assert not (tmp_path / "mined.unfinished").exists()
    mine(recipe("mining.range_min=0", f"data.name={tmp_path / 'whole'}"))
    assert same_data(mined, tmp_path / "whole")
    assert parts_written(changed, monkeypatch) == []  # and is done
