"""What training leaves in its output folder: nothing of it is lost, or taken for what it is not."""

from __future__ import annotations

import json
import os
import shutil

import pytest

pytest.importorskip("typer")
pytest.importorskip("pylate")

import torch
from pylate.models import ColBERT
from safetensors.torch import load_file
from test_misuse import command
from tiny_recipe import tiny, write

from pylate_fastmaxsim.recipes import output as run_folder
from pylate_fastmaxsim.recipes import train as training
from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.measure import measure
from pylate_fastmaxsim.recipes.prepare import prepare
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


def test_a_run_does_not_go_on_with_files_that_were_rewritten(tmp_path, monkeypatch):
    file, out, pairs = write(tmp_path, tiny(tmp_path)), tmp_path / "out", tmp_path / "pairs.jsonl"
    recipe = load_recipe(file)
    first = training.train(recipe)
    content = pairs.read_text()
    # Moved or copied anew, with a time of its own and the same rows.
    os.utime(pairs, ns=(0, 0))
    assert training.train(recipe)["resumed_from"] == "checkpoint-14"
    pairs.write_text(content.replace("number 3", "number 4"))
    assert len(pairs.read_text()) == len(content)
    with pytest.raises(RecipeError) as error:
        training.train(recipe)
    assert str(error.value) == (
        f"data.files: {pairs} changed after the checkpoints in {out} were made; bring the earlier content back, choose "
        "another output_dir, or start over with --no-resume."
    )
    result = json.loads((out / "train.json").read_text())
    assert result["losses"] == first["losses"] and result["ndcg@10"] == first["ndcg@10"]
    assert training.train(recipe, resume=False)["resumed_from"] is None
    # What has not changed since is not read a second time, and a folder of an earlier version says nothing of it.
    with monkeypatch.context() as patch:
        patch.delattr(run_folder, "content_digest")
        assert training.train(recipe)["resumed_from"] == "checkpoint-14"
    (out / "files.json").unlink()
    pairs.write_text(content)
    assert training.train(recipe)["resumed_from"] == "checkpoint-14"
