"""Mining: the negatives of brute force with the teacher's scores, and data that train."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from pylate.scores import colbert_scores
from sentence_transformers import CrossEncoder

from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.files import hold_lock
from pylate_fastmaxsim.recipes.mining import mine as mining_dataset
from pylate_fastmaxsim.recipes.mining import mine as mining_mine
from pylate_fastmaxsim.recipes.mining.pairs import load_pairs
from pylate_fastmaxsim.recipes.models.load import load_model
from pylate_fastmaxsim.recipes.training.train import train
from tests.support.mining_recipe import answers, mine_but_stop, parts_written, recipe_for, same_data, written_to
from tests.support.recipe_runs import command
from tests.support.tiny_recipe import hub_dataset, text


@pytest.mark.parametrize("rules", [{}, {"absolute_margin": -0.5, "relative_margin": -0.3, "min_score": 6.0}])
def test_negatives_are_those_of_brute_force(rules, encoder, teacher, tmp_path):
    overrides, own = [f"mining.{name}={value}" for name, value in rules.items()], []
    if rules:
        # Texts of its own, one of them twice, among texts that are positives as well.
        own = [f"{text(i, 1 + i % 20)} extra {i}" for i in [*range(30), 3]]
        rows = [{"passage": passage} for passage in [*own[:20], *answers(), *own[20:]]]
        overrides.append(f"mining.corpus={{source: hub, name: {hub_dataset(tmp_path / 'corpus', passages=rows)}}}")
    recipe = recipe_for(tmp_path, encoder("modernbert"), teacher, *overrides)
    summary = mining_mine.mine(recipe)
    train_rows, queries, documents = (
        Dataset.from_parquet(f"{tmp_path}/mined/{name}.parquet") for name in ("train", "queries", "documents")
    )
    pairs = load_pairs(recipe.mining)
    queries, documents = queries["text"][:], documents["text"][:]
    assert (queries, documents) == (pairs.queries["text"][:], pairs.documents["text"][:])
    assert len(set(queries)) == len(queries) and documents == [*dict.fromkeys(answers()), *own[:30]]
    assert pairs.documents.cache_files  # and not in memory
    assert summary["rows"] + summary["left_out"] == len(pairs.rows) == 40 and summary["rows"] == len(train_rows) > 0

    model = load_model(recipe.model, "cpu", recipe.training.seed)
    q, d = (
        model.encode(texts, is_query=is_query, convert_to_tensor=True)
        for texts, is_query in ((queries, True), (documents, False))
    )
    scores = np.array([[colbert_scores(one[None], other[None]).item() for other in d] for one in q])
    expected = {}
    for query, positives in enumerate(pairs.positives()):
        lowest = min(scores[query][document] for document in positives)
        ranked = [int(x) for x in np.argsort(-scores[query], kind="stable") if x not in positives][:12]
        left = [x for x in ranked if not rules or 6.0 <= scores[query][x] <= min(lowest + 0.5, lowest * 1.3)]
        if len(left[1:4]) == 3:
            expected[query] = left[1:4]
    assert {int(row["query_id"]) for row in train_rows} == set(expected)
    grader = CrossEncoder(teacher, device="cpu")
    for row in train_rows:
        positive, *negatives = map(int, row["document_ids"])
        assert (int(row["query_id"]), positive) in pairs.rows
        assert negatives == expected[int(row["query_id"])]
        texts = [(queries[int(row["query_id"])], documents[int(x)]) for x in row["document_ids"]]
        assert row["scores"] == pytest.approx(grader.predict(texts).tolist(), abs=1e-5)


@pytest.mark.e2e
def test_mined_data_train_alike_stock_and_fast_and_with_a_colbert_teacher(encoder, teacher, tmp_path):
    recipe = recipe_for(tmp_path, encoder("modernbert"), teacher)
    mining_mine.mine(recipe)
    results = []
    for fast in (False, True):
        switched = replace(recipe.fast, enabled=fast, stock_masking=fast)
        results.append(train(replace(recipe, fast=switched, output_dir=str(tmp_path / f"fast-{fast}"))))
    for (_, expected), (_, got) in zip(*(result["losses"] for result in results), strict=True):
        assert got == pytest.approx(expected, rel=1e-3) and expected > 1e-3
    # Once more from the trained model, which is also a ColBERT that can teach.
    model = results[1]["model"]
    again = [f"data.name={tmp_path / 'mined-2'}", "mining.teacher_type=colbert", f"output_dir={tmp_path / 'out-2'}"]
    second = recipe_for(tmp_path, model, model, *again)
    mining_mine.mine(second)
    scores = Dataset.from_parquet(str(tmp_path / "mined-2" / "train.parquet"))["scores"][:]
    # Documents that the tokenizer makes the same are scored the same.
    assert all(min(row) == 0 and max(row) <= 1 for row in scores)
    assert sum(max(row) == pytest.approx(1) for row in scores) > len(scores) / 2
    # The student is its own teacher, and there is nothing to learn.
    assert train(second)["losses"][0][1] == pytest.approx(0, abs=1e-5)


def test_other_settings_and_other_folders_are_refused(encoder, teacher, tmp_path, monkeypatch):
    recipe, mined = recipe_for(tmp_path, encoder("modernbert"), teacher), tmp_path / "mined"
    summary = mining_mine.mine(recipe)
    assert parts_written(recipe, monkeypatch) == [] and mining_mine.mine(recipe) == summary
    changed = recipe_for(tmp_path, encoder("modernbert"), teacher, "mining.range_min=0")
    with pytest.raises(RecipeError, match="was mined with other settings; keep them, choose another folder, or "):
        mining_mine.mine(changed)
    # Sizes of batches and parts may differ.
    pieces = ["mining.batch_size=3", "mining.documents_per_part=7", "mining.rows_per_part=50"]
    assert mining_mine.mine(recipe_for(tmp_path, encoder("modernbert"), teacher, *pieces)) == summary
    # A recipe that cannot be mined removes nothing and leaves nothing.
    wrong = recipe_for(tmp_path, encoder("modernbert"), teacher, "mining.teacher=/no/such/model")
    with pytest.raises(RecipeError, match="mining.teacher /no/such/model cannot be loaded: "):
        mining_mine.mine(wrong, resume=False)
    assert (mined / "mining.json").exists() and not (tmp_path / "mined.unfinished").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    for name, said in (("other", "must be a folder for mining to write, but .* something else"), ("pairs", "reads")):
        other = recipe_for(tmp_path, encoder("modernbert"), teacher, f"data.name={tmp_path / name}")
        with pytest.raises(RecipeError, match=f"data.name .*{said}"):
            mining_mine.mine(other, resume=False)
    (mined / "mining.json").write_text("{}")
    with pytest.raises(RecipeError, match="mining.json is damaged"):
        mining_mine.mine(recipe)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("mining.range_max=3", "mining.range_max must be at least range_min + num_negatives, got 3, 1 and 3."),
        (
            "model={build: {}}",
            "model.build does not apply to fastmaxsim mine, which searches with a model that is trained.",
        ),
        ("mining.pairs.columns=[answer, query]", "mining.pairs.columns must be the query and its positive"),
        (
            "mining.corpus={source: hub, name: a, columns: [b, c]}",
            "mining.corpus.columns must name one column, got b, c",
        ),
        (
            "mining.corpus={source: hub, name: PAIRS}",
            "mining.corpus.columns must be the text of a document, got query,",
        ),
        ("mining.max_score=-100", "mining: no query has as many negatives as mining.num_negatives"),
        ("data.name=/proc/x/mined", "data.name /proc/x cannot be made: No such file or directory."),
    ],
)
def test_what_does_not_fit_is_one_sentence(override, sentence, encoder, teacher, tmp_path):
    with pytest.raises(RecipeError) as error:
        override = override.replace("PAIRS", str(tmp_path / "pairs"))
        mining_mine.mine(recipe_for(tmp_path, encoder("modernbert"), teacher, override))
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_before_mining_a_training_says_that_it_comes_first(encoder, teacher, tmp_path):
    done = command("train", written_to(tmp_path, recipe_for(tmp_path, encoder("modernbert"), teacher)))
    assert done.exit_code == 2 and "mined is not there yet; run `fastmaxsim mine` with this recipe first" in done.stderr


def test_the_command_says_what_is_mined_and_what_is_kept(encoder, teacher, tmp_path, monkeypatch):
    file = written_to(tmp_path, recipe_for(tmp_path, encoder("modernbert"), teacher))
    for error, exit_code, said in (
        (KeyboardInterrupt(), 130, "Interrupted: what is done is kept, and the same command goes on from there."),
        (
            OSError(28, "No space left on device", "x.npz"),
            1,
            "fastmaxsim: x.npz: No space left on device; what is done",
        ),
        (torch.OutOfMemoryError("CUDA\nMore lines."), 2, "fastmaxsim: mining.batch_size of 4 is more than fits into"),
    ):

        def failing(*args, error=error):
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(mining_mine.DocumentSearch, "lowest_positive_scores", failing)
            done = command("mine", file)
        assert done.exit_code == exit_code and done.stderr.strip().splitlines()[-1].startswith(said)
    with hold_lock("data.name", tmp_path, "mined" + mining_mine.LOCK_ENDING, ""):
        done = command("mine", file)
    assert done.exit_code == 2 and "mined is being mined by another command" in done.stderr
    done = command("mine", file)
    assert done.exit_code == 0 and "mined" in done.stdout and "Searching: 100%" in done.stderr


@pytest.mark.parametrize("stopped", ["nowhere", "teacher", "mining.json"])
def test_starting_over_replaces_what_mining_wrote_and_nothing_else(stopped, encoder, teacher, tmp_path, monkeypatch):
    mined = tmp_path / "mined"
    mining_mine.mine(recipe_for(tmp_path, encoder("modernbert"), teacher))
    (mined / "run").mkdir()
    (mined / "run" / "notes.txt").write_text("of the user")
    (mined / "README.md").write_text((mined / "README.md").read_text() + "# A card of the user\n")
    own = {path: path.read_text() for path in (mined / "README.md", mined / "run" / "notes.txt")}
    before = {path.name: path.read_bytes() for path in mined.glob("*.parquet")}
    changed = recipe_for(tmp_path, encoder("modernbert"), teacher, "mining.range_min=0")
    replace_file = mining_dataset.os.replace

    def interrupting(source, target):
        if Path(target) == mined / stopped:
            raise KeyboardInterrupt
        replace_file(source, target)

    if stopped == "nowhere":
        mining_mine.mine(changed, resume=False)
    elif stopped == "teacher":
        mine_but_stop(changed, stopped, 2, monkeypatch, resume=False)
        assert before == {path.name: path.read_bytes() for path in mined.glob("*.parquet")}
    else:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(mining_dataset.os, "replace", interrupting)
            mining_mine.mine(changed, resume=False)
    if stopped != "nowhere":
        assert not (mined / "mining.json").exists()
        assert "search" not in parts_written(changed, monkeypatch)  # it goes on
    assert {path: path.read_text() for path in own} == own
    assert {path.name for path in mined.iterdir()} == {*before, "README.md", "mining.json", "run"}
    assert not (tmp_path / "mined.unfinished").exists()
    whole = ["mining.range_min=0", f"data.name={tmp_path / 'whole'}"]
    mining_mine.mine(recipe_for(tmp_path, encoder("modernbert"), teacher, *whole))
    assert same_data(mined, tmp_path / "whole")
    assert parts_written(changed, monkeypatch) == []  # and is done
