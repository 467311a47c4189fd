"""What training leaves in its output folder: nothing of it is lost, or taken for what it is not."""

from __future__ import annotations

import errno
import io
import json
import shutil
import subprocess
import sys

import pytest

pytest.importorskip("typer")
pytest.importorskip("matplotlib")
pytest.importorskip("pylate")

import torch
from filelock import FileLock
from pylate.models import ColBERT
from rich.console import Console
from safetensors.torch import load_file
from test_misuse import command
from tiny_recipe import tiny, write
from typer.testing import CliRunner

from pylate_fastmaxsim.cli.commands import app
from pylate_fastmaxsim.recipes.comparison import compare as comparing
from pylate_fastmaxsim.recipes.comparison.measure import measure
from pylate_fastmaxsim.recipes.comparison.report import mining_table, training_table
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.files.lock import only_command
from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.training import train as training
from pylate_fastmaxsim.recipes.training.prepare import prepare


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
    """A recipe whose rows have three positives between them: no four of them make a batch without duplicates."""
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

    monkeypatch.setattr("pylate_fastmaxsim.recipes.files.lock.FileLock", Unsupported)
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
