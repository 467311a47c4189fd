"""What training leaves in its output folder: nothing of it is lost, or taken for what it is not."""

from __future__ import annotations

import errno
import io
import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("typer")
pytest.importorskip("matplotlib")
pytest.importorskip("pylate")

import torch
import yaml
from filelock import FileLock
from pylate.models import ColBERT
from rich.console import Console
from safetensors.torch import load_file
from test_misuse import command
from tiny_recipe import tiny, write
from typer.testing import CliRunner

from pylate_fastmaxsim.recipes import compare as comparing
from pylate_fastmaxsim.recipes import disk
from pylate_fastmaxsim.recipes import output as run_folder
from pylate_fastmaxsim.recipes import train as training
from pylate_fastmaxsim.recipes.commands import app
from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.lock import only_command
from pylate_fastmaxsim.recipes.measure import measure
from pylate_fastmaxsim.recipes.prepare import prepare
from pylate_fastmaxsim.recipes.report import mining_table, training_table
from pylate_fastmaxsim.recipes.schema import RecipeError


def without_checkpoints(folder, output="out"):
    return write(folder, tiny(folder, output, training={"max_steps": 3, "save_steps": None}))


def ending_with(error: BaseException):
    def evaluate(*args):
        raise error

    return evaluate


def test_the_model_is_saved_before_it_is_evaluated(tmp_path, monkeypatch, caplog):
    whole = training.train(load_recipe(without_checkpoints(tmp_path, "whole")))
    file, out = without_checkpoints(tmp_path), tmp_path / "out"
    out.mkdir()
    (out / "train.json").write_text('{"ndcg@10": 1.0}')  # of an earlier run, not of the model that is saved now
    monkeypatch.setattr(training, "evaluate", ending_with(KeyboardInterrupt()))
    done = command("train", file)
    assert done.exit_code == 130
    assert caplog.messages[-1] == (
        f"The evaluation did not come to its end: the trained model is in {out}/model, and {out}/train.json has no metrics."
    )
    weights = [load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "out")]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    assert ColBERT(str(out / "model"), device="cpu").encode(["a query"], is_query=True)[0].shape == (8, 8)
    result = json.loads((out / "train.json").read_text())
    assert result["losses"] == whole["losses"] and "ndcg@10" not in result
    card = (out / "model" / "README.md").read_text()
    assert card.count("## Training recipe") == 1 and "ndcg@10" not in card


def test_the_evaluation_still_comes_into_the_card_and_leaves_the_weights_alone(tmp_path, monkeypatch):
    evaluate, seen = training.evaluate, []
    saved = tmp_path / "out" / "model"

    def noting(*args):
        seen.append({path.name: path.stat().st_mtime_ns for path in saved.iterdir()})
        return evaluate(*args)

    monkeypatch.setattr(training, "evaluate", noting)
    result = training.train(load_recipe(without_checkpoints(tmp_path)))
    card = (saved / "README.md").read_text()
    assert card.count("## Training recipe") == 1 and "ndcg@10" in card.partition("## Training recipe")[0]
    changed = {path.name for path in saved.iterdir() if path.stat().st_mtime_ns != seen[0].get(path.name)}
    assert changed == {"README.md"}
    assert json.loads((tmp_path / "out" / "train.json").read_text()) == result and result["ndcg@10"] > 0


def test_an_evaluation_out_of_memory_names_its_batch_size_and_the_model(tmp_path, monkeypatch):
    file, out = without_checkpoints(tmp_path), tmp_path / "out"
    monkeypatch.setattr(training, "evaluate", ending_with(torch.OutOfMemoryError("CUDA out of memory.\nMore lines.")))
    done = command("train", file)
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1] == (
        f"fastmaxsim: evaluation.batch_size of 32 is more than fits into memory; the trained model is in {out}/model, and "
        f"{out}/train.json has no metrics."
    )
    assert (out / "model" / "model.safetensors").exists()


def files_of(folder) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_new_model_replaces_all_of_an_earlier_one(tmp_path):
    recipe, out = load_recipe(without_checkpoints(tmp_path)), tmp_path / "out"
    training.train(recipe)
    first = files_of(out / "model")
    (out / "model" / "adapter_config.json").write_text("{}")  # as of a training of adapters
    training.train(recipe, resume=False)
    assert files_of(out / "model") == first
    assert sorted(path.name for path in out.iterdir()) == [
        "files.json",
        "model",
        "prepared",
        "processes.json",
        "recipe-of-checkpoints.yaml",
        "train.json",
    ]


def test_a_model_that_cannot_be_saved_leaves_the_earlier_one(tmp_path, monkeypatch):
    recipe, out = load_recipe(without_checkpoints(tmp_path)), tmp_path / "out"
    training.train(recipe)
    first, result = files_of(out / "model"), (out / "train.json").read_text()

    def full(folder, recipe):
        assert (folder / "model.safetensors").exists()
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(training, "name_recipe", full)
        with pytest.raises(OSError, match="No space left"):
            training.train(recipe, resume=False)
    assert files_of(out / "model") == first and (out / "train.json").read_text() == result
    assert not list(out.glob("*-model"))
    # What an end in between has left is in nobody's way.
    for name in ("writing-model", "replaced-model"):
        shutil.copytree(out / "model", out / name)
        (out / name / "stale").write_text("")
    training.train(recipe, resume=False)
    assert files_of(out / "model") == first and not list(out.glob("*-model"))


def test_a_new_model_is_never_beside_the_result_of_an_earlier_one(tmp_path, monkeypatch):
    recipe, out = load_recipe(without_checkpoints(tmp_path)), tmp_path / "out"
    training.train(recipe)
    monkeypatch.setattr(training, "_write_result", ending_with(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        training.train(recipe, resume=False)
    assert (out / "model").exists() and not (out / "train.json").exists()


def test_a_model_on_another_disk_stays_there(tmp_path):
    elsewhere, out = tmp_path / "elsewhere" / "models", tmp_path / "out"
    elsewhere.mkdir(parents=True)
    out.mkdir()
    (out / "model").symlink_to(elsewhere, target_is_directory=True)
    training.train(load_recipe(without_checkpoints(tmp_path)))
    assert (out / "model").is_symlink() and (elsewhere / "model.safetensors").exists()


def repetitive(folder, **training_section):
    """A recipe whose rows have three positives between them, so that no four of them make a batch without duplicates."""
    section = {"max_steps": 3, "save_steps": None, "batch_sampler": "no_duplicates", **training_section}
    file = write(folder, tiny(folder, training=section))
    rows = [{"query": f"what is class {i}", "positive": ("yes", "no", "maybe")[i % 3]} for i in range(60)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_a_recipe_without_a_single_batch_is_not_called_trained(tmp_path):
    file, out = repetitive(tmp_path), tmp_path / "out"
    done = command("train", file)
    sentence = (
        "training.per_device_train_batch_size of 4 with training.batch_sampler no_duplicates leaves no batch of the rows "
        "of data, so that no step was taken; lower it or set training.dataloader_drop_last to false."
    )
    assert (done.exit_code, done.stderr.splitlines()[-1]) == (2, f"fastmaxsim: {sentence}")
    assert not (out / "model").exists() and not (out / "train.json").exists()
    with pytest.raises(RecipeError) as error:
        measure(prepare(load_recipe(file)), tmp_path / "steps.jsonl")
    assert str(error.value) == sentence
    for way_out in ("training.per_device_train_batch_size=3", "training.dataloader_drop_last=false"):
        assert training.train(load_recipe(file, [way_out]))["steps"] == 3


def test_a_size_of_which_there_is_no_batch_is_a_point_of_a_sweep(tmp_path):
    prepared = prepare(load_recipe(repetitive(tmp_path)))
    point = measure(prepared, tmp_path / "steps.jsonl", steps_only=True)
    assert point["status"] == "no batch of this size" and "memory" not in point


def test_copies_of_checkpoints_are_neither_continued_nor_removed(tmp_path):
    file, out = write(tmp_path, tiny(tmp_path, training={"max_steps": 8, "save_total_limit": None})), tmp_path / "out"
    recipe = load_recipe(file)
    training.train(recipe)
    copies = [shutil.copytree(out / "checkpoint-8", out / name) for name in ("checkpoint-8-backup", "checkpoint-x")]
    for name in ("checkpoint-8.tar", "checkpoint-12"):
        copies.append(out / name)
        copies[-1].write_bytes(b"a file, which no checkpoint is")
    assert run_folder.last_checkpoint(recipe).name == "checkpoint-8"
    assert training.train(recipe)["resumed_from"] == "checkpoint-8"
    assert training.train(load_recipe(file, ["training.save_steps=5"]), resume=False)["resumed_from"] is None
    left = [*copies, out / "checkpoint-5", out / "checkpoint-8"]
    assert sorted(out.glob("checkpoint-*")) == sorted(left)
    assert all((copy / "trainer_state.json").exists() for copy in copies[:2])


def test_what_is_left_of_a_checkpoint_is_not_gone_on_from(tmp_path, monkeypatch):
    recipe, out = load_recipe(write(tmp_path, tiny(tmp_path, training={"max_steps": 8}))), tmp_path / "out"
    training.train(recipe)
    with monkeypatch.context() as patch:
        # Killed while the first file of the first checkpoint goes.
        patch.setattr(run_folder.shutil, "rmtree", ending_with(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            training.train(recipe, resume=False)
    assert list(out.glob("checkpoint-*/model.safetensors"))
    assert training.train(recipe)["resumed_from"] is None


@pytest.mark.parametrize("resume", [False, True])
def test_a_checkpoint_is_not_removed_by_the_run_that_begins_with_it(resume, tmp_path):
    file, out = write(tmp_path, tiny(tmp_path, training={"max_steps": 8})), tmp_path / "out"
    training.train(load_recipe(file))
    kept, name = files_of(out), str(out / "checkpoint-8")
    changed = tiny(tmp_path, training={"max_steps": 8}) | {"model": {"name_or_path": name}}
    with pytest.raises(RecipeError) as error:
        training.train(load_recipe(write(tmp_path, changed)), resume=resume)
    assert str(error.value) == (
        f"model.name_or_path: {name} is one of the checkpoints in output_dir, which this run replaces; copy it to another "
        "folder, or choose another output_dir."
    )
    assert files_of(out) == kept


def test_settings_of_the_model_with_numbers_for_keys_go_on(tmp_path):
    values = tiny(tmp_path, training={"max_steps": 4})
    values["model"]["config_kwargs"] = {"id2label": {0: "one", 1: "other"}}
    recipe = load_recipe(write(tmp_path, values))
    training.train(recipe)
    assert training.train(recipe)["resumed_from"] == "checkpoint-4"


def test_another_number_of_processes_does_not_go_on(tmp_path):
    file, out = write(tmp_path, tiny(tmp_path, training={"max_steps": 6})), tmp_path / "out"
    training.train(load_recipe(file))
    record = out / run_folder.PROCESSES_FILE
    assert json.loads(record.read_text()) == {"processes": 1}
    record.write_text('{"processes": 8}')
    # Nothing is left to do but the evaluation, for which one is enough.
    assert training.train(load_recipe(file))["resumed_from"] == "checkpoint-6"
    assert json.loads(record.read_text()) == {"processes": 8}
    shutil.rmtree(out / "checkpoint-6")
    done = command("train", file)
    assert (done.exit_code, done.stderr) == (
        2,
        f"fastmaxsim: the number of processes is 1, but the checkpoints in {out} were made with 8; keep it, choose another "
        "output_dir, or start over with --no-resume.\n",
    )
    record.unlink()  # as in a folder of an earlier version
    assert training.train(load_recipe(file))["resumed_from"] == "checkpoint-4"


def test_a_recipe_in_the_output_folder_stays_as_it_is(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    file = write(tmp_path, tiny(tmp_path)).rename(out / "recipe.yaml")
    file.write_text("# why it is so\n" + file.read_text())
    before = file.read_text()
    recipe = load_recipe(file, ["training.weight_decay=0.1"])
    training.train(recipe)
    assert training.train(recipe)["resumed_from"] == "checkpoint-14" and file.read_text() == before
    with pytest.raises(RecipeError, match="training.weight_decay is 0.0, but the checkpoints in .* with 0.1"):
        training.train(load_recipe(file))


def test_checkpoints_of_an_earlier_version_go_on_where_its_keys_had_the_defaults(tmp_path):
    file, out = write(tmp_path, tiny(tmp_path, training={"max_steps": 4})), tmp_path / "out"
    training.train(load_recipe(file))
    record = yaml.safe_load((out / run_folder.RECIPE_FILE).read_text())
    for section, name in (("training", "adam_epsilon"), ("model", "config_kwargs"), ("fast", "stock_masking")):
        del record[section][name]
    del record["model"]["build"]["global_attn_every_n_layers"], record["loss"]

    def forget():
        (out / run_folder.RECIPE_FILE).write_text(yaml.safe_dump(record))

    forget()
    assert training.train(load_recipe(file))["resumed_from"] == "checkpoint-4"
    for override, sentence in {
        "training.adam_epsilon=1e-6": "training.adam_epsilon is 1e-06, but the checkpoints in .* were made with 1e-08; ",
        "fast.stock_masking=true": "fast.stock_masking is True, but the checkpoints in .* were made with False; ",
        "loss.temperature=2": "loss.temperature is 2.0, but the checkpoints in .* were made with None; ",
        "model.build.global_attn_every_n_layers=1": "layers is 1, but the checkpoints in .* were made with 3; ",
    }.items():
        forget()
        with pytest.raises(RecipeError, match=sentence):
            training.train(load_recipe(file, [override]))


def test_what_changes_rounding_and_memory_may_change_and_other_masking_is_said(tmp_path, caplog, monkeypatch):
    values = tiny(tmp_path, training={"max_steps": 4, "save_steps": 2}, evaluation={"rows": 0})
    values["fast"]["stock_masking"] = True

    def warned(file, *overrides, resumed="checkpoint-4") -> list[str]:
        caplog.clear()
        assert training.train(load_recipe(file, overrides))["resumed_from"] == resumed
        return [message for message in caplog.messages if "masked" in message]

    file = write(tmp_path, values)
    training.train(load_recipe(file))
    assert not warned(file, "fast.fused_head=false", "loss.score_mini_batch_size=2")
    assert not warned(file, "fast.enabled=true")
    file = write(tmp_path, values | {"fast": {"enabled": False}}, "other")
    training.train(load_recipe(file), resume=False)
    # Evaluated another way than trained, each time; the last steps trained another way than the first, once.
    for last in ("checkpoint-4", "checkpoint-4", "checkpoint-2"):
        if last == "checkpoint-2":
            shutil.rmtree(tmp_path / "out" / "checkpoint-4")
        assert warned(file, "fast.enabled=true", resumed=last) == [
            f"pylate-fastmaxsim is on, but the checkpoints in {tmp_path}/out were made with it off: stock PyLate lets "
            "masked document tokens win and this package does not, so that scores differ from here on."
        ]
    assert not warned(file, "fast.enabled=true", "fast.fused_head=false")
    with monkeypatch.context() as patch:
        patch.setenv("PYLATE_FASTMAXSIM", "0")
        (warning,) = warned(file, "fast.enabled=true")
        assert warning.startswith(
            f"pylate-fastmaxsim is off, but the checkpoints in {tmp_path}/out were made with it on: "
        )
    assert len(warned(file)) == 1


@pytest.mark.parametrize("by_folder", [True, False])
def test_a_training_that_is_over_keeps_its_card_and_what_it_was_trained_with(by_folder, tmp_path, monkeypatch):
    # As where the model that a training began with is on the Hub, under its name or the end of its path.
    def on_the_hub(name):
        assert not by_folder or name.count("/") == 1
        return SimpleNamespace(id=name, sha="1")

    monkeypatch.setattr("sentence_transformers.model_card.get_model_info", on_the_hub)
    file, out = write(tmp_path, tiny(tmp_path, training={"max_steps": 4})), tmp_path / "out"
    first = training.train(load_recipe(file))
    card = (out / "model" / "README.md").read_text()
    assert card.count("## Evaluation") == card.count("## Training recipe") == 1 and "base_model: " in card
    assert first == training.train(load_recipe(file)) | {"resumed_from": None}
    assert (out / "model" / "README.md").read_text() == card
    for _ in range(2):
        changed = training.train(load_recipe(file, ["name=other", "fast.enabled=true", "evaluation.batch_size=8"]))
        assert (changed["recipe"], changed["losses"]) == ("other", first["losses"])
        assert changed["fast"] == first["fast"] | {"why_off": "the model was trained without it before"}
    expected = card.replace("recipe `tiny`", "recipe `other`").replace("name: tiny", "name: other")
    assert (out / "model" / "README.md").read_text() == expected.replace("  batch_size: 32\n", "  batch_size: 8\n")


@pytest.mark.parametrize(
    "name", [run_folder.RECIPE_FILE, run_folder.FILES_FILE, run_folder.MINED_FILE, run_folder.PROCESSES_FILE]
)
def test_a_record_that_cannot_be_read_is_one_sentence(name, tmp_path):
    file, record = write(tmp_path, tiny(tmp_path, training={"max_steps": 4})), tmp_path / "out" / name
    training.train(load_recipe(file))
    record.write_text('{"cut')
    done = command("train", file)
    is_recipe = name == run_folder.RECIPE_FILE
    go_on = "move it away to go on without it"
    if is_recipe:
        go_on = "write into it the recipe that stands in their README.md to go on"
    assert (done.exit_code, done.stderr) == (
        2,
        f"fastmaxsim: output_dir: {record} says what the checkpoints beside it were made of, but cannot be read; {go_on}, "
        "choose another output_dir, or start over with --no-resume.\n",
    )
    if is_recipe:
        record.write_text(recipe_in_card(tmp_path / "out" / "checkpoint-4"))
    else:
        record.unlink()
    assert training.train(load_recipe(file))["resumed_from"] == "checkpoint-4"
    record.write_text('{"cut')
    assert training.train(load_recipe(file), resume=False)["resumed_from"] is None
    assert training.train(load_recipe(file))["resumed_from"] == "checkpoint-4"


def recipe_in_card(folder) -> str:
    return (folder / "README.md").read_text().partition("## Training recipe")[2].split("```")[1].removeprefix("yaml\n")


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_checkpoints_of_no_recipe_are_neither_adopted_nor_removed(resume, whole, tmp_path):
    file, out = write(tmp_path, tiny(tmp_path, training={"max_steps": 4, "save_total_limit": 1})), tmp_path / "out"
    training.train(load_recipe(file))
    foreign = out / "checkpoint-4"
    if not whole:
        (foreign / "trainer_state.json").unlink()
    for path in [*out.glob("*.json"), out / run_folder.RECIPE_FILE]:
        path.unlink()
    before = files_of(out)
    with pytest.raises(RecipeError) as error:
        training.train(load_recipe(file, ["training.learning_rate=1"]), resume=resume)
    assert str(error.value) == (
        f"output_dir: {out} holds checkpoint-4, but no recipe-of-checkpoints.yaml that says of which recipe its checkpoints "
        "are; choose another output_dir, move them away, or, if a recipe made them, copy it from their README.md into that "
        "file."
    )
    assert files_of(out) == before
    # What the sentence offers.
    (out / run_folder.RECIPE_FILE).write_text(recipe_in_card(foreign))
    resumed = training.train(load_recipe(file), resume=resume)["resumed_from"]
    assert resumed == ("checkpoint-4" if resume and whole else None)


def test_a_record_is_replaced_when_the_new_one_is_whole(tmp_path, monkeypatch):
    file, out = write(tmp_path, tiny(tmp_path, training={"max_steps": 4})), tmp_path / "out"
    training.train(load_recipe(file))
    records = {path: path.read_text() for path in (out / run_folder.RECIPE_FILE, out / run_folder.FILES_FILE)}

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk.os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        training.train(load_recipe(file, ["name=other"]))
    assert {path: path.read_text() for path in records} == records


def test_the_same_command_twice_at_the_same_time(tmp_path, monkeypatch):
    file, out = without_checkpoints(tmp_path), tmp_path / "out"
    build, refused = training.build_trainer, []

    def once_more(*args):
        monkeypatch.setattr(training, "build_trainer", build)
        refused.append(command("train", file))
        return build(*args)

    monkeypatch.setattr(training, "build_trainer", once_more)
    assert command("train", file).exit_code == 0
    assert [(done.exit_code, done.stderr) for done in refused] == [
        (
            2,
            f"fastmaxsim: output_dir: {out} is being trained in by another command; wait until it ends, or choose another "
            "folder.\n",
        )
    ]
    assert (out / "train.json").exists() and not list(out.glob("*lock*"))


@pytest.mark.parametrize(("above", "sentence"), [("", ": {} cannot be reached"), ("new", " {} cannot be made")])
def test_a_folder_whose_name_is_too_long_is_one_sentence(above, sentence, tmp_path):
    folder = tmp_path / above / ("x" * 300)
    done = CliRunner().invoke(app, ["compare", str(write(tmp_path, tiny(tmp_path))), "--output", str(folder)])
    sentence = f"output_dir{sentence.format(folder)}: File name too long."
    assert (done.exit_code, done.stderr) == (2, f"fastmaxsim: {sentence}\n")


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("~/runs", "HOME/runs"),
        ("[5]", "[5]"),  # as it stands
        ("a::b", "output_dir must not have :: in it, by which datasets joins file systems, got a::b."),
        ("", "output_dir must not be empty."),
        ("FILE/runs", "output_dir must be a directory or a path yet to be made, but FILE is a file."),
    ],
)
def test_the_folder_given_to_compare_is_that_of_the_recipe(output, expected, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    file = write(tmp_path, tiny(tmp_path))
    output, expected = (text.replace("FILE", str(file)) for text in (output, expected))
    asked = []
    monkeypatch.setattr(comparing, "compare", lambda recipe, *_: asked.append(recipe.output_dir) or sys.exit(0))
    done = CliRunner().invoke(app, ["compare", str(file), f"--output={output}"])
    if expected.startswith("output_dir"):
        assert (done.exit_code, done.stderr, asked) == (2, f"fastmaxsim: {expected}\n", [])
    else:
        assert (done.exit_code, asked) == (0, [expected.replace("HOME", str(tmp_path))])


def test_two_processes_are_refused_while_another_command_trains(tmp_path):
    file, out = without_checkpoints(tmp_path), tmp_path / "out"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    arguments = [*launcher, "-m", "pylate_fastmaxsim.cli", "train", str(file)]
    with only_command("output_dir", out, training.LOCK_FILE, ""):
        refused = subprocess.run(arguments, capture_output=True, text=True, timeout=300)
        assert [path.name for path in out.iterdir()] == [training.LOCK_FILE]
    assert refused.returncode != 0 and refused.stderr.count("is being trained in by another command; wait until") == 1
    assert not out.exists()


def test_a_folder_that_cannot_be_locked_is_trained_in(tmp_path, monkeypatch, caplog):
    class Unsupported(FileLock):
        def acquire(self, *args, **kwargs):
            raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("pylate_fastmaxsim.recipes.lock.FileLock", Unsupported)
    assert training.train(load_recipe(without_checkpoints(tmp_path)))["steps"] == 3
    assert f"{tmp_path}/out cannot be locked, so start no second command that writes it." in caplog.messages


@pytest.mark.parametrize("table", [training_table, mining_table])
def test_paths_are_shown_whole_however_narrow_the_log(table):
    path = "/a-folder" * 9 + "/model"
    numbers = dict.fromkeys(("queries", "documents", "rows", "left_out", "steps"), 1)
    fast = {"enabled": True}
    result = numbers | {"recipe": "r", "resumed_from": None, "losses": [], "fast": fast, "model": path, "data": path}
    console = Console(width=60, file=io.StringIO())
    console.print(table(result))
    shown = console.file.getvalue()
    assert path in "".join(line.strip("│ ").rpartition("│")[2].strip() for line in shown.splitlines())
