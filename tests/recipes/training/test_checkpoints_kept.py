"""Checkpoints and the records beside them: what goes on from which, and what is never taken or removed."""

from __future__ import annotations

import errno
import json
import shutil
from types import SimpleNamespace

import pytest

pytest.importorskip("typer")
pytest.importorskip("matplotlib")
pytest.importorskip("pylate")

import yaml
from test_misuse import command
from test_output_kept import ending_with, files_of
from tiny_recipe import tiny, write

from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.files import records
from pylate_fastmaxsim.recipes.files import write as files_write
from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.training import checkpoints
from pylate_fastmaxsim.recipes.training import train as training
from pylate_fastmaxsim.recipes.training.checkpoints import last_checkpoint
from pylate_fastmaxsim.recipes.training.run_directory import open_output


def test_copies_of_checkpoints_are_neither_continued_nor_removed(tmp_path):
    file, out = write(tmp_path, tiny(tmp_path, training={"max_steps": 8, "save_total_limit": None})), tmp_path / "out"
    recipe = load_recipe(file)
    training.train(recipe)
    copies = [shutil.copytree(out / "checkpoint-8", out / name) for name in ("checkpoint-8-backup", "checkpoint-x")]
    for name in ("checkpoint-8.tar", "checkpoint-12"):
        copies.append(out / name)
        copies[-1].write_bytes(b"a file, which no checkpoint is")
    assert last_checkpoint(recipe).name == "checkpoint-8"
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
        patch.setattr(checkpoints.shutil, "rmtree", ending_with(KeyboardInterrupt()))
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
    record = out / records.PROCESSES_FILE
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


def test_checkpoints_of_an_earlier_version_go_on_where_its_keys_had_the_defaults(tmp_path):
    file, out = write(tmp_path, tiny(tmp_path, training={"max_steps": 4})), tmp_path / "out"
    training.train(load_recipe(file))
    record = yaml.safe_load((out / records.RECIPE_FILE).read_text())
    for section, name in (("training", "adam_epsilon"), ("model", "config_kwargs"), ("fast", "stock_masking")):
        del record[section][name]
    del record["model"]["build"]["global_attn_every_n_layers"], record["loss"]

    def forget():
        (out / records.RECIPE_FILE).write_text(yaml.safe_dump(record))

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


@pytest.mark.parametrize("name", [records.RECIPE_FILE, records.FILES_FILE, records.MINED_FILE, records.PROCESSES_FILE])
def test_a_record_that_cannot_be_read_is_one_sentence(name, tmp_path):
    file, record = write(tmp_path, tiny(tmp_path, training={"max_steps": 4})), tmp_path / "out" / name
    training.train(load_recipe(file))
    record.write_text('{"cut')
    done = command("train", file)
    is_recipe = name == records.RECIPE_FILE
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
    for path in [*out.glob("*.json"), out / records.RECIPE_FILE]:
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
    (out / records.RECIPE_FILE).write_text(recipe_in_card(foreign))
    resumed = training.train(load_recipe(file), resume=resume)["resumed_from"]
    assert resumed == ("checkpoint-4" if resume and whole else None)


def test_the_part_of_a_checkpoint_on_another_machine_needs_no_record(tmp_path):
    recipe, out = load_recipe(write(tmp_path, tiny(tmp_path))), tmp_path / "out"
    (out / "checkpoint-4").mkdir(parents=True)
    (out / "checkpoint-4" / "rng_state_1.pth").touch()
    for resume in (True, False):
        # What the machines see is compared afterwards.
        checkpoint, _ = open_output(recipe, resume, writes=False, processes=2)
        assert checkpoint is None
    with pytest.raises(RecipeError, match="holds checkpoint-4, but no recipe-of-checkpoints.yaml"):
        open_output(recipe, True, writes=True, processes=2)
    (out / "checkpoint-4" / "trainer_state.json").write_text("{}")
    with pytest.raises(RecipeError, match="holds checkpoint-4, but no recipe-of-checkpoints.yaml"):
        open_output(recipe, True, writes=False, processes=2)


def test_a_record_is_replaced_when_the_new_one_is_whole(tmp_path, monkeypatch):
    file, out = write(tmp_path, tiny(tmp_path, training={"max_steps": 4})), tmp_path / "out"
    training.train(load_recipe(file))
    before = {path: path.read_text() for path in (out / records.RECIPE_FILE, out / records.FILES_FILE)}

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files_write.os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        training.train(load_recipe(file, ["name=other"]))
    assert {path: path.read_text() for path in before} == before
