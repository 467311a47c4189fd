import errno
import json
import shutil
from pathlib import Path
from unittest import mock

import pytest
import yaml

from pylate_fastmaxsim.integrations.log import reset_log_once
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.files import hold_lock
from pylate_fastmaxsim.recipes.load import dump_recipe, load_recipe
from pylate_fastmaxsim.recipes.training import run_directory
from pylate_fastmaxsim.recipes.training import train as training
from pylate_fastmaxsim.recipes.training.run_directory import RECIPE_FILE, last_checkpoint
from tests.support.power_cut import content
from tests.support.recipe_runs import command
from tests.support.tiny_recipe import tiny, write


@pytest.fixture(scope="module")
def once(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("once")
    training.train(load_recipe(write(folder, tiny(folder, training={"max_steps": 4, "save_steps": 2}))))
    return folder


@pytest.fixture
def trained(once, tmp_path) -> Path:
    shutil.copytree(once / "out", tmp_path / "out")
    return write(tmp_path, yaml.safe_load((once / "tiny.yaml").read_text()) | {"output_dir": str(tmp_path / "out")})


def test_from_a_damaged_checkpoint_the_run_goes_back_to_the_one_before(trained, tmp_path, caplog):
    checkpoint = tmp_path / "out" / "checkpoint-4"
    for name in ("model.safetensors", "scheduler.pt", "trainer_state.json", "config.json", "optimizer.pt"):
        reset_log_once()
        caplog.clear()
        whole = (checkpoint / name).read_bytes()
        for damaged in (whole[: len(whole) // 2], bytes(len(whole)), b""):
            (checkpoint / name).write_bytes(damaged)
            assert last_checkpoint(load_recipe(trained)).name == "checkpoint-2"
        said = f"{checkpoint / name} is damaged, so training does not go on from {checkpoint} but from the checkpoint before"
        assert [message.startswith(said) for message in caplog.messages] == [True]
        (checkpoint / name).write_bytes(damaged if name == "optimizer.pt" else whole)
    assert training.train(load_recipe(trained))["resumed_from"] == "checkpoint-2"
    shutil.rmtree(checkpoint)
    checkpoint = tmp_path / "out" / "checkpoint-2"
    (checkpoint / "optimizer.pt").unlink()
    with pytest.raises(RecipeError, match=f"^output_dir: {checkpoint} has no optimizer.pt and cannot be gone on from"):
        training.train(load_recipe(trained))


def test_another_recipe_is_refused_with_the_keys_that_differ(trained, tmp_path):
    out = tmp_path / "out"
    before = content(out)
    done = command("train", trained, "training.learning_rate=1", "loss.pooling.top_k=4", "name=free")
    said = "fastmaxsim: loss.pooling.top_k is 4 and was None, training.learning_rate is 1.0 and was 0.001 in the recipe of "
    assert done.exit_code == 2 and done.stderr.startswith(said) and done.stderr.count("\n") == 1
    assert content(out) == before
    with pytest.raises(RecipeError, match="training.adam_epsilon is 1e-06 and was 1e-08 in the recipe"):
        training.train(load_recipe(trained, ["training.adam_epsilon=1e-6"]))
    assert training.train(load_recipe(trained))["resumed_from"] == "checkpoint-4"
    assert training.train(load_recipe(trained, ["loss.temperature=2"]), resume=False)["resumed_from"] is None


def test_a_run_that_is_over_is_extended_along_the_longer_schedule(trained, tmp_path, caplog):
    whole = training.train(load_recipe(trained, [f"output_dir={tmp_path / 'whole'}", "training.max_steps=6"]))
    with pytest.raises(RecipeError, match="training.max_steps is 3 and was 4 in the recipe of the checkpoints"):
        training.train(load_recipe(trained, ["training.max_steps=3"]))
    longer = load_recipe(trained, ["training.max_steps=6"])
    # As a power cut leaves it: the longer recipe is recorded, and no step of it is taken.
    (tmp_path / "out" / RECIPE_FILE).write_text(dump_recipe(longer))
    parts = training.train(longer)
    assert (parts["resumed_from"], parts["steps"]) == ("checkpoint-4", 6) and len(parts["losses"]) == 6
    # Of the same rows, at other rates until then.
    assert parts["losses"][0] == whole["losses"][0] and parts["losses"][5] != whole["losses"][5]
    history = json.loads((tmp_path / "out" / "checkpoint-6" / "trainer_state.json").read_text())["log_history"]
    rates = {entry["step"]: entry["learning_rate"] for entry in history if "learning_rate" in entry}
    assert rates[4] == pytest.approx(1e-3 / 4) and rates[6] == pytest.approx(1e-3 / 6)
    training.train(load_recipe(trained, ["training.max_steps=8"]))
    assert f"The run in {tmp_path / 'out'} is longer than it was begun for" in caplog.text
    assert training.train(load_recipe(trained, ["training.max_steps=8"]))["resumed_from"] == "checkpoint-8"


def test_another_number_of_processes_is_refused_while_steps_are_left(trained, tmp_path):
    last, before = tmp_path / "out" / "checkpoint-4", tmp_path / "out" / "checkpoint-2"
    for checkpoint in (last, before):
        (checkpoint / "rng_state.pth").rename(checkpoint / "rng_state_0.pth")
        shutil.copy(checkpoint / "rng_state_0.pth", checkpoint / "rng_state_1.pth")
    # Only the evaluation is left, for which one process is enough.
    assert training.train(load_recipe(trained))["resumed_from"] == "checkpoint-4"
    shutil.rmtree(last)
    with pytest.raises(RecipeError, match="checkpoint-2 has the random states of 2 processes, and this run has 1; "):
        training.train(load_recipe(trained))
    # A process that does not write, of a machine with a disk of its own, does not judge what is on it.
    (tmp_path / "away" / "checkpoint-4").mkdir(parents=True)
    shutil.copy(before / "rng_state_1.pth", tmp_path / "away" / "checkpoint-4")
    elsewhere = load_recipe(trained, [f"output_dir={tmp_path / 'away'}"])
    assert last_checkpoint(elsewhere) is None
    assert run_directory.open_run_directory(elsewhere, None, True, writes=False, processes=2) == (elsewhere, None)


@pytest.mark.parametrize("resume", [True, False])
def test_checkpoints_of_an_unknown_recipe_are_neither_adopted_nor_removed(resume, trained, tmp_path):
    out = tmp_path / "out"
    (out / RECIPE_FILE).unlink()
    before = content(out)
    with pytest.raises(RecipeError, match=f"^output_dir: {out} has checkpoints but no recipe-of-checkpoints.yaml"):
        training.train(load_recipe(trained), resume=resume)
    assert before.items() <= content(out).items()


def test_copies_of_checkpoints_are_neither_continued_nor_removed(trained, tmp_path):
    out = tmp_path / "out"
    copies = [shutil.copytree(out / "checkpoint-4", out / name) for name in ("checkpoint-8-backup", "checkpoint-x")]
    copies.append(out / "checkpoint-12")
    copies[-1].write_bytes(b"a file")
    assert last_checkpoint(load_recipe(trained)).name == "checkpoint-4"
    overrides = ["training.save_steps=3", "training.save_total_limit=null"]
    training.train(load_recipe(trained, overrides), resume=False)
    assert sorted(out.glob("checkpoint-*")) == sorted([*copies, out / "checkpoint-3", out / "checkpoint-4"])


def test_checkpoints_that_were_being_removed_do_not_count(trained, tmp_path):
    with mock.patch.object(shutil, "rmtree", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        run_directory.remove_checkpoints(tmp_path / "out")
    assert list((tmp_path / "out").glob("checkpoint-*/model.safetensors"))
    assert training.train(load_recipe(trained))["resumed_from"] is None


def test_other_masking_is_said(tmp_path, caplog):
    values = tiny(tmp_path, training={"max_steps": 2, "save_steps": 2}, evaluation={"rows": 0})
    other = f"pylate-fastmaxsim is on, but the checkpoints in {tmp_path}/out were made with it off"
    # With stock masking and with another pooling masked tokens are the same with and without the plugin.
    for changed in ({}, {"fast": {"enabled": False, "stock_masking": True}}, {"loss": {"pooling": {"top_k": 2}}}):
        file = write(tmp_path, values | changed)
        training.train(load_recipe(file), resume=False)
        caplog.clear()
        again = training.train(load_recipe(file, ["fast.enabled=true", "fast.padding_free=false"]))
        assert again["resumed_from"] == "checkpoint-2"
        assert any(message.startswith(other) for message in caplog.messages) == (not changed)


def test_a_second_command_is_refused_while_the_first_trains(tmp_path):
    file, out = write(tmp_path, tiny(tmp_path)), tmp_path / "out"
    with hold_lock("output_dir", out / training.LOCK_FILE, ""):
        done = command("train", file)
        assert [path.name for path in out.iterdir()] == [training.LOCK_FILE]
    assert done.exit_code == 2 and f"output_dir: {out} is being trained in by another command" in done.stderr


def test_a_file_system_without_locks_is_written_with_a_warning(tmp_path, caplog):
    lost = OSError(errno.ENOLCK, "No locks available")
    with mock.patch("pylate_fastmaxsim.files.lock.FileLock.acquire", side_effect=lost):
        hold_lock("output_dir", tmp_path / "out" / "lock", "").__enter__()
    assert caplog.messages[0].startswith(f"{tmp_path}/out is on a file system without locks")
