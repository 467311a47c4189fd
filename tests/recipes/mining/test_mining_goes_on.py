"""Mining with changed settings, too little memory, a wrong teacher or a second command beside it loses nothing."""

# ruff: noqa: F811  (fixtures of another file)
from __future__ import annotations

import json
import re
import shlex
import shutil
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import pytest

pytest.importorskip("datasets")
pytest.importorskip("pylate")

import torch
import yaml
from datasets import Dataset
from models import load_model as load_colbert
from safetensors.torch import load_file, save_file
from test_mining import RECIPE, mine_but_stop, recipe_for, teacher  # noqa: F401  (a fixture)
from transformers import AutoConfig, BertForSequenceClassification
from typer.testing import CliRunner

from pylate_fastmaxsim.cli.commands import app
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.mining import dataset as mining_dataset
from pylate_fastmaxsim.recipes.mining import mine as mining_mine
from pylate_fastmaxsim.recipes.mining import negatives, resumable
from pylate_fastmaxsim.recipes.training.train import train


@pytest.fixture(scope="module")
def other_teacher(teacher, tmp_path_factory) -> str:
    folder = shutil.copytree(teacher, tmp_path_factory.mktemp("other") / "teacher")
    torch.manual_seed(1)
    BertForSequenceClassification(AutoConfig.from_pretrained(teacher)).save_pretrained(folder)
    return str(folder)


def written_to(folder: Path, recipe) -> Path:
    file = folder / "mine.yaml"
    file.write_text(yaml.safe_dump(asdict(recipe)))
    return file


def parts_written(recipe, monkeypatch) -> list[str]:
    """The stages of the parts that mining computes."""
    write, written = resumable.write_whole, []
    with monkeypatch.context() as patch:
        patch.setattr(resumable, "write_whole", lambda file, writer: (written.append(file.name), write(file, writer)))
        mining_mine.mine(recipe)
    return [name.partition("-")[0] for name in written if not name.startswith("settings")]


# Of 40 documents in parts of 15, and of 40 rows in parts of 9, of which two had a teacher's scores.
SEARCH, POSITIVES, TEACHER = ["search"] * 3, ["positives"] * 5, ["teacher"] * 5


@pytest.mark.parametrize(
    ("override", "anew", "said"),
    [
        ("mining.batch_size=2", TEACHER[2:], None),
        ("mining.teacher=OTHER", TEACHER, "2 finished parts of the stage teacher .* have changed: mining.teacher."),
        ("mining.num_negatives=2", TEACHER, "2 finished parts of the stage teacher .* have changed: the negatives."),
        ("mining.range_max=14", [*SEARCH, *TEACHER[2:]], "3 finished parts of the stage search .*: mining.range_max."),
        (
            "model.query_length=10",
            [*SEARCH, *POSITIVES, *TEACHER],
            "5 finished parts of the stage positives .*: model.",
        ),
    ],
)
def test_changed_settings_keep_what_they_do_not_concern(
    override,
    anew,
    said,
    encoder,
    teacher,
    other_teacher,
    tmp_path,
    monkeypatch,
    caplog,
):
    mine_but_stop(recipe_for(tmp_path, encoder("modernbert"), teacher), "teacher", 2, monkeypatch)
    caplog.clear()
    override = override.replace("OTHER", other_teacher)
    changed = recipe_for(tmp_path, encoder("modernbert"), teacher, override)
    assert parts_written(changed, monkeypatch) == anew
    messages = "\n".join(message for message in caplog.messages if message.startswith("mining: "))
    assert re.search(said, messages) if said else not messages
    whole = recipe_for(tmp_path, encoder("modernbert"), teacher, override, f"data.name={tmp_path / 'whole'}")
    mining_mine.mine(whole)
    if "batch_size" not in override:  # other batches round otherwise
        for name in ("train", "queries", "documents"):
            ours, expected = (tmp_path / folder / f"{name}.parquet" for folder in ("mined", "whole"))
            assert ours.read_bytes() == expected.read_bytes()


def test_other_texts_under_the_same_name_are_mined_anew(encoder, teacher, tmp_path, monkeypatch):
    recipe = recipe_for(tmp_path, encoder("modernbert"), teacher)
    mine_but_stop(recipe, "teacher", 2, monkeypatch)
    for written in ("pairs", "mined"):
        shutil.rmtree(tmp_path / written, ignore_errors=True)
    monkeypatch.setattr("test_mining.answers", lambda: [f"another answer {i}" for i in range(40)])
    recipe = recipe_for(tmp_path, encoder("modernbert"), teacher)
    assert parts_written(recipe, monkeypatch) == [*SEARCH, *POSITIVES, *TEACHER]


def test_other_weights_in_the_same_folder_are_mined_anew(encoder, teacher, other_teacher, tmp_path, monkeypatch):
    model, grader = (
        str(shutil.copytree(folder, tmp_path / name))
        for name, folder in {"model": encoder("modernbert"), "grader": teacher}.items()
    )
    mine_but_stop(recipe_for(tmp_path, model, grader), "teacher", 2, monkeypatch)
    shutil.copytree(other_teacher, grader, dirs_exist_ok=True)
    mine_but_stop(recipe_for(tmp_path, model, grader), "teacher", 3, monkeypatch)
    assert len(list((tmp_path / "mined.unfinished").glob("teacher-*"))) == 3
    weights = Path(model, "model.safetensors")
    save_file({name: value * 1.5 for name, value in load_file(weights).items()}, weights, {"format": "pt"})
    assert parts_written(recipe_for(tmp_path, model, grader), monkeypatch) == [*SEARCH, *POSITIVES, *TEACHER]


def test_what_is_not_loaded_of_a_model_is_no_other_model(encoder, teacher, tmp_path, monkeypatch):
    model = shutil.copytree(encoder("modernbert"), tmp_path / "model")
    recipe = recipe_for(tmp_path, str(model), teacher)
    mine_but_stop(recipe, "teacher", 2, monkeypatch)
    for name in ("README.md", ".cache/huggingface/model.safetensors.lock", "run/recipe-of-checkpoints.yaml"):
        Path(model, name).parent.mkdir(parents=True, exist_ok=True)
        Path(model, name).write_text("anything")
    assert parts_written(recipe, monkeypatch) == TEACHER[2:]


def test_finished_data_is_not_taken_for_that_of_other_inputs(encoder, teacher, other_teacher, tmp_path):
    model, grader = (
        shutil.copytree(folder, tmp_path / name)
        for name, folder in {"model": encoder("modernbert"), "grader": teacher}.items()
    )
    recipe = recipe_for(tmp_path, str(model), str(grader))
    pairs = tmp_path / "pairs" / "pair" / "train-00000-of-00001.parquet"
    summary = mining_mine.mine(recipe)
    assert mining_mine.mine(recipe) == summary and "inputs" not in summary
    weights = model / "model.safetensors"
    rows = Dataset.from_list([{"query": f"question {i}", "answer": f"another answer {i}"} for i in range(40)])
    changes = {
        "mining.pairs or mining.corpus": (pairs, lambda: rows.to_parquet(pairs)),
        "model": (
            weights,
            lambda: save_file({name: 2 * x for name, x in load_file(weights).items()}, weights, {"format": "pt"}),
        ),
        "mining.teacher": (
            grader / "model.safetensors",
            lambda: shutil.copy(Path(other_teacher) / "model.safetensors", grader),
        ),
    }
    for name, (file, change) in changes.items():
        before = file.read_bytes()
        change()
        with pytest.raises(RecipeError) as error:
            mining_mine.mine(recipe)
        assert str(error.value) == (
            f"data.name: {tmp_path / 'mined'} was mined with other content of {name} than there is now; bring it back, "
            "choose another folder, or start over with --no-resume."
        )
        file.write_bytes(before)
        assert mining_mine.mine(recipe) == summary
    # What was mined before inputs were recorded is taken as it is.
    record = tmp_path / "mined" / "mining.json"
    record.write_text(json.dumps({name: x for name, x in json.loads(record.read_text()).items() if name != "inputs"}))
    rows.to_parquet(pairs)
    assert mining_mine.mine(recipe) == summary
    assert mining_mine.mine(recipe, resume=False)["queries"] == 40


def test_data_mined_by_an_earlier_version_is_complete_where_its_keys_had_the_defaults(encoder, teacher, tmp_path):
    recipe = recipe_for(tmp_path, encoder("modernbert"), teacher)
    summary = mining_mine.mine(recipe)
    record = tmp_path / "mined" / "mining.json"
    written = json.loads(record.read_text())
    for name in ("corpus", "teacher_type", "min_score"):
        del written["settings"]["mining"][name]
    del written["settings"]["mining"]["pairs"]["n_ways"], written["settings"]["model"]["lora"]
    record.write_text(json.dumps(written))
    assert mining_mine.mine(recipe) == summary
    for override in ("mining.teacher_type=colbert", "mining.min_score=1", "mining.range_min=0"):
        with pytest.raises(RecipeError, match="was mined with other settings"):
            mining_mine.mine(recipe_for(tmp_path, encoder("modernbert"), teacher, override))


def test_the_way_out_that_an_error_names_keeps_the_search(encoder, teacher, tmp_path, monkeypatch):
    with pytest.raises(RecipeError, match="lower it or loosen the margins, for which the search is kept, or raise"):
        mining_mine.mine(recipe_for(tmp_path, encoder("modernbert"), teacher, "mining.max_score=-100"))
    loosened = recipe_for(tmp_path, encoder("modernbert"), teacher)
    assert parts_written(loosened, monkeypatch) == TEACHER


# By what is given as a teacher: what it is taken for, what its checkpoint lacks, and what to do.
NO_HEAD = (
    "must have a scoring head, as a cross-encoder has, but its checkpoint holds no classifier.bias, so that its scores"
)
NO_PROJECTION = "must have a projection, as a ColBERT has, but its checkpoint holds none, so that its scores"
HEADLESS = {
    "a ColBERT": ("cross_encoder", NO_HEAD, "set mining.teacher_type to colbert."),
    "an encoder": ("cross_encoder", NO_HEAD, "name a cross-encoder."),
    "an encoder as a colbert": ("colbert", NO_PROJECTION, "name a trained ColBERT."),
    "a cross-encoder": ("colbert", NO_PROJECTION, "set mining.teacher_type to cross_encoder."),
}


@pytest.mark.parametrize("kind", ["missing", "missing colbert", "no tokenizer", "three scores", *HEADLESS])
def test_a_teacher_that_cannot_teach_is_found_before_the_search(
    kind,
    encoder,
    teacher,
    tmp_path,
    monkeypatch,
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    folder = tmp_path / "wrong"
    overrides, sentence = [f"mining.teacher={folder}"], f"mining.teacher {folder} cannot be loaded: "
    if kind == "missing colbert":
        overrides.append("mining.teacher_type=colbert")
    elif kind == "no tokenizer":
        shutil.copytree(teacher, folder, ignore=shutil.ignore_patterns("tokenizer*", "vocab*"))
        sentence = f"mining.teacher {folder} has no tokenizer that can be loaded; it must be saved beside the model."
    elif kind == "three scores":
        shutil.copytree(teacher, folder)
        BertForSequenceClassification(AutoConfig.from_pretrained(teacher, num_labels=3)).save_pretrained(folder)
        sentence = f"mining.teacher {folder} must give one score a pair, but it gives 3."
    elif kind == "a ColBERT":
        load_colbert(encoder("bert")).save_pretrained(str(folder))
    elif kind in HEADLESS:
        shutil.copytree(teacher if kind == "a cross-encoder" else encoder("bert"), folder)
    if kind in HEADLESS:
        taken_for, lack, way_out = HEADLESS[kind]
        overrides.append(f"mining.teacher_type={taken_for}")
        sentence = f"mining.teacher {folder} {lack} would be random; {way_out}"
    recipe = recipe_for(tmp_path, encoder("modernbert"), teacher, *overrides)
    done = CliRunner().invoke(app, ["mine", str(written_to(tmp_path, recipe))])
    assert done.exit_code == 2 and done.stderr.startswith(f"fastmaxsim: {sentence}") and done.stderr.count("\n") == 1
    assert "Searching" not in done.stderr and not (tmp_path / "mined.unfinished").exists()


def test_a_teacher_with_the_projection_of_stanfords_checkpoints_is_taken(encoder, tmp_path):
    folder = shutil.copytree(encoder("bert"), tmp_path / "stanford")
    weights, config = folder / "model.safetensors", folder / "config.json"
    linear = torch.randn(8, json.loads(config.read_text())["hidden_size"])
    save_file(load_file(weights) | {"linear.weight": linear}, weights, {"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": ["HF_ColBERT"]}))
    recipe = recipe_for(tmp_path, encoder("bert"), str(folder), "mining.teacher_type=colbert")
    assert callable(mining_mine.load_teacher(recipe.mining, torch.device("cpu")))


@pytest.mark.parametrize("kind", ["model", "positives", "cross_encoder", "colbert"])
def test_scores_that_are_not_finite_are_refused_before_they_are_used(kind, encoder, teacher, tmp_path, monkeypatch):
    folder = tmp_path / "lost"
    if kind == "cross_encoder":
        shutil.copytree(teacher, folder)
        name, file, overrides = "mining.teacher", folder / "model.safetensors", [f"mining.teacher={folder}"]
    else:
        load_colbert(encoder("bert")).save_pretrained(str(folder))
        name, file, overrides = "model.name_or_path", folder / "1_Dense" / "model.safetensors", []
        if kind == "colbert":
            name, overrides = "mining.teacher", [f"mining.teacher={folder}", "mining.teacher_type=colbert"]
    save_file({key: value * torch.nan for key, value in load_file(file).items()}, file, {"format": "pt"})
    model = str(folder) if name == "model.name_or_path" else encoder("modernbert")
    recipe = recipe_for(tmp_path, model, teacher, "model.embedding_size=null", *overrides)
    if kind == "positives":  # as on a GPU, where another batch may overflow
        monkeypatch.setattr(
            negatives, "search", lambda *args: (torch.ones(len(args[0]), 9), torch.arange(9).repeat(len(args[0]), 1))
        )
    with pytest.raises(RecipeError) as error:
        mining_mine.mine(recipe)
    assert str(error.value) == (
        f"{name} {folder} must give scores that are finite numbers, but some of them are NaN or infinite."
    )
    stage = {"model": "search", "positives": "positives"}.get(kind, "teacher")
    assert not list((tmp_path / "mined.unfinished").glob(f"{stage}-*")) and not (tmp_path / "mined").exists()


def test_the_same_command_twice_at_the_same_time(encoder, teacher, tmp_path, monkeypatch):
    file = written_to(tmp_path, recipe_for(tmp_path, encoder("modernbert"), teacher))
    write, refused = resumable.write_whole, []

    def once_more(file_to_write, content):
        monkeypatch.setattr(resumable, "write_whole", write)
        refused.extend(CliRunner().invoke(app, ["mine", str(file), *options]) for options in ([], ["--no-resume"]))
        write(file_to_write, content)

    monkeypatch.setattr(resumable, "write_whole", once_more)
    first = CliRunner().invoke(app, ["mine", str(file)])
    assert first.exit_code == 0, first.output
    assert [done.exit_code for done in refused] == [2, 2]
    assert {done.stderr for done in refused} == {
        f"fastmaxsim: data.name: {tmp_path / 'mined'} is being mined by another command; wait until it ends, or choose "
        "another folder.\n"
    }
    assert (tmp_path / "mined" / "mining.json").exists() and not (tmp_path / "mined.unfinished").exists()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (".", "data.name must be a folder for mining to write, got '.'."),
        ("..", "data.name must be a folder for mining to write, got '..'."),
        ("/", "data.name must be a folder for mining to write, got '/'."),
        ("/proc/x/mined", "data.name /proc/x/mined.unfinished cannot be made: No such file or directory."),
    ],
)
def test_a_folder_that_mining_cannot_write_is_one_sentence(name, sentence, encoder, teacher, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = recipe_for(tmp_path, encoder("modernbert"), teacher, f"data.name={name}")
    before = sorted(tmp_path.parent.iterdir())
    done = CliRunner().invoke(app, ["mine", str(written_to(tmp_path, recipe))])
    assert (done.exit_code, done.stderr) == (2, f"fastmaxsim: {sentence}\n")
    assert sorted(tmp_path.parent.iterdir()) == before


def test_out_of_memory_names_the_batch_size_and_a_smaller_one_goes_on(
    encoder,
    teacher,
    tmp_path,
    monkeypatch,
):
    file = written_to(tmp_path, recipe_for(tmp_path, encoder("modernbert"), teacher))
    search, seen = negatives.search, []

    def third_is_too_much(*args):
        seen.append(args)
        if len(seen) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nSee documentation")
        return search(*args)

    with monkeypatch.context() as patch:
        patch.setattr(negatives, "search", third_is_too_much)
        failed = CliRunner().invoke(app, ["mine", str(file)])
    assert failed.exit_code == 2
    assert failed.stderr.splitlines()[-1] == (
        "fastmaxsim: mining.batch_size of 4 is more than fits into memory; what is done is kept, and the same command "
        "with a smaller one goes on from there."
    )
    smaller = recipe_for(tmp_path, encoder("modernbert"), teacher, "mining.batch_size=2")
    assert parts_written(smaller, monkeypatch) == [*SEARCH[2:], *POSITIVES, *TEACHER]


def test_training_does_not_go_on_with_data_mined_anew(encoder, teacher, other_teacher, tmp_path):
    grader = shutil.copytree(teacher, tmp_path / "grader")
    recipe = recipe_for(tmp_path, encoder("modernbert"), str(grader), "training.save_steps=1")
    mining_mine.mine(recipe)
    assert train(recipe)["resumed_from"] is None
    mining_mine.mine(recipe, resume=False)  # which gives the same
    assert train(recipe)["resumed_from"] == "checkpoint-2"
    # Other weights in the same place, which no key of the recipe tells.
    shutil.copytree(other_teacher, grader, dirs_exist_ok=True)
    mining_mine.mine(recipe, resume=False)
    with pytest.raises(RecipeError) as error:
        train(recipe)
    assert str(error.value) == (
        f"data.name: {tmp_path / 'mined'} was mined anew after the checkpoints in {tmp_path / 'out'} were made; choose "
        "another output_dir, or start over with --no-resume."
    )
    assert train(recipe, resume=False)["resumed_from"] is None
    assert train(recipe)["resumed_from"] == "checkpoint-2"


def test_training_does_not_go_on_with_mined_data_that_was_edited(encoder, teacher, tmp_path):
    recipe = recipe_for(tmp_path, encoder("modernbert"), teacher, "training.save_steps=1")
    mining_mine.mine(recipe)
    train(recipe)
    file = tmp_path / "mined" / "train.parquet"
    rows = Dataset.from_parquet(str(file), cache_dir=str(tmp_path / "cache"))
    rows.map(lambda row: {"scores": row["scores"][::-1]}).to_parquet(str(file))
    with pytest.raises(RecipeError, match=f"data.name: {tmp_path / 'mined'} changed after the checkpoints"):
        train(recipe)


@pytest.mark.parametrize("stopped", ["nowhere", "in the search", "train.parquet", "mining.json"])
def test_starting_over_replaces_what_mining_wrote_and_nothing_else(stopped, encoder, teacher, tmp_path, monkeypatch):
    mined = tmp_path / "mined"
    recipe = recipe_for(tmp_path, encoder("modernbert"), teacher, f"output_dir={mined / 'run'}")
    mining_mine.mine(recipe)
    train(recipe)
    (mined / "notes.txt").write_text("of the user")
    (mined / "README.md").write_text((mined / "README.md").read_text() + "# A card of the user\n")
    own = {
        path: path.stat().st_mtime_ns for path in (mined / "README.md", mined / "notes.txt", *mined.glob("run/**/*"))
    }
    before = {path.name: path.read_bytes() for path in mined.iterdir() if path.is_file()}
    changed = recipe_for(tmp_path, encoder("modernbert"), teacher, f"output_dir={mined / 'run'}", "mining.range_min=0")
    replace = mining_dataset.os.replace

    def interrupting(source, target):
        if Path(target) == mined / stopped:
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(mining_dataset.os, "replace", interrupting)
        if stopped == "in the search":
            patch.setattr(mining_mine, "lowest_positive_scores", lambda *args: interrupting(None, mined / stopped))
        mining_mine.mine(changed, resume=False)
    assert (mined / "mining.json").exists() == (stopped in ("nowhere", "in the search"))
    if stopped == "in the search":  # the earlier data are still whole
        assert before == {path.name: path.read_bytes() for path in mined.iterdir() if path.is_file()}
    if stopped != "nowhere":
        assert "search" not in parts_written(changed, monkeypatch)  # it goes on
    assert own == {path: path.stat().st_mtime_ns for path in own} and len(own) > 8
    assert sorted(path.name for path in mined.iterdir()) == sorted([*before, "run"])
    assert not (tmp_path / "mined.unfinished").exists()
    whole = recipe_for(
        tmp_path, encoder("modernbert"), teacher, "mining.range_min=0", f"data.name={tmp_path / 'whole'}"
    )
    mining_mine.mine(whole)
    for name in ("train", "queries", "documents"):
        ours, expected = (folder / f"{name}.parquet" for folder in (mined, tmp_path / "whole"))
        assert ours.read_bytes() == expected.read_bytes()
    assert parts_written(changed, monkeypatch) == []  # and is done


@pytest.mark.parametrize("place", ["missing", "full", "empty"])
def test_mining_into_a_folder_on_another_disk(place, encoder, teacher, tmp_path):
    recipe, elsewhere = recipe_for(tmp_path, encoder("modernbert"), teacher), tmp_path / "elsewhere"
    elsewhere.mkdir()
    if place != "empty":
        (tmp_path / "mined").symlink_to(elsewhere / "mined")
    else:
        (tmp_path / "mined").mkdir()
    summary = mining_mine.mine(recipe)
    if place == "full":
        assert mining_mine.mine(recipe, resume=False) == summary
    assert sorted(file.name for file in elsewhere.iterdir()) == ([] if place == "empty" else ["mined"])
    assert (tmp_path / "mined" / "mining.json").exists() and not (tmp_path / "mined.unfinished").exists()


def test_the_second_round_that_the_recipe_names_is_a_run_of_its_own():
    lines = [line.removeprefix("#   fastmaxsim ") for line in RECIPE.read_text().splitlines() if "--set model" in line]
    commands = [shlex.split(line) for line in lines]
    assert [command[:2] for command in commands] == [
        [name, "recipes/colbert_kd_mine.yaml"] for name in ("mine", "train")
    ]
    first = load_recipe(RECIPE)
    mined, trained = (load_recipe(RECIPE, [part for part in command[2:] if part != "--set"]) for command in commands)
    assert mined.data.name == trained.data.name != first.data.name
    assert mined.model == trained.model and mined.model.name_or_path == f"{first.output_dir}/model"
    assert trained.output_dir != first.output_dir


@pytest.mark.parametrize("command", ["train", "compare"])
def test_before_mining_the_recipe_says_that_it_comes_first(command, encoder, teacher, tmp_path):
    file = written_to(tmp_path, recipe_for(tmp_path, encoder("modernbert"), teacher))
    done = CliRunner().invoke(app, [command, str(file)])
    assert (done.exit_code, done.stderr) == (
        2,
        f"fastmaxsim: data.name: {tmp_path / 'mined'} is not there yet; run `fastmaxsim mine` with this recipe first, "
        "which writes it.\n",
    )


def test_what_was_mined_is_compared_both_ways(encoder, teacher, tmp_path):
    options = ["fast.stock_masking=true", "training.max_steps=3"]
    file = written_to(tmp_path, recipe_for(tmp_path, encoder("modernbert"), teacher, *options))
    for command in ("mine", "compare"):
        done = CliRunner().invoke(app, [command, str(file)])
        assert done.exit_code == 0, done.output
    comparison = yaml.safe_load((tmp_path / "out" / "compare.json").read_text())
    stock, fast = (comparison["runs"][mode] for mode in ("stock", "fast"))
    assert len(stock["losses"]) == 3 and fast["losses"] == pytest.approx(stock["losses"], rel=1e-4)
    assert fast["ndcg@10"] == pytest.approx(stock["ndcg@10"])
    assert (tmp_path / "out" / "compare.html").exists()
