"""Training that is interrupted, or run again, goes on where it was and ends where an uninterrupted run does."""

import json
import math
import os
import re
import signal
from pathlib import Path

import pytest

pytest.importorskip("datasets")
pytest.importorskip("pylate")

import torch
import transformers
from safetensors.torch import load_file
from tiny_recipe import text, tiny, write
from transformers import TrainerCallback

from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.training import epochs
from pylate_fastmaxsim.recipes.training import train as training
from pylate_fastmaxsim.recipes.training.checkpoints import last_checkpoint
from pylate_fastmaxsim.recipes.training.sharded import RecipeTrainer


class Interrupt(TrainerCallback):
    """Sends this process the signal of Ctrl-C in the middle of a step."""

    def __init__(self, step: int = 10) -> None:
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGINT)


def interrupt(recipe, monkeypatch, callback: TrainerCallback) -> str:
    """Train until the callback interrupts; the name of the checkpoint that is left."""
    build = training.build_trainer

    def build_interrupted(*args, **kwargs):
        trainer = build(*args, **kwargs)
        trainer.add_callback(callback)
        return trainer

    with monkeypatch.context() as patch:
        patch.setattr(training, "build_trainer", build_interrupted)
        with pytest.raises(KeyboardInterrupt):
            training.train(recipe)
    return last_checkpoint(recipe).name


class Failure(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        raise OSError("No space left on device")


def test_a_run_that_fails_leaves_ctrl_c_as_it_was(tmp_path, monkeypatch):
    build = training.build_trainer

    def build_failing(*args, **kwargs):
        trainer = build(*args, **kwargs)
        trainer.add_callback(Failure())
        return trainer

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(training, "build_trainer", build_failing)
    with pytest.raises(OSError, match="No space left"):
        training.train(load_recipe(write(tmp_path, tiny(tmp_path, "whole"))))
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("sampler", ["batch_sampler", "no_duplicates"])
def test_an_interrupted_run_that_goes_on_ends_where_an_uninterrupted_one_does(sampler, tmp_path, monkeypatch):
    def recipe(name):
        # 36 training rows: the interruption falls into the second epoch, between two checkpoints.
        return load_recipe(write(tmp_path, tiny(tmp_path, name)), [f"training.batch_sampler={sampler}"])

    whole = training.train(recipe("whole"))
    assert interrupt(recipe("parts"), monkeypatch, Interrupt()) == "checkpoint-11"
    assert not (tmp_path / "parts" / "train.json").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    parts = training.train(recipe("parts"))
    assert parts["resumed_from"] == "checkpoint-11"
    assert parts["losses"] == whole["losses"] and len(whole["losses"]) == 14
    assert parts["ndcg@10"] == whole["ndcg@10"]
    weights = [load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "parts")]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])

    # Nothing is left to do, in the middle of an epoch: the same again, not one step more.
    assert training.train(recipe("parts"))["losses"] == whole["losses"]
    for path in (tmp_path / "parts").glob("checkpoint-*"):
        assert path.name in ("checkpoint-12", "checkpoint-14")


def uneven(folder: Path, name: str, **section) -> dict:
    """A recipe whose epochs have fewer batches than rows would fill: a third of the 36 rows has the same query."""
    options = {"batch_sampler": "no_duplicates", "max_steps": None, "num_train_epochs": 3, "save_steps": 4}
    values = tiny(folder, name, training=options | section, evaluation={"rows": 0})
    queries = ["what is late interaction" if row < 12 else f"{text(row, 4)} number {row}" for row in range(36)]
    rows = [{"query": query, "positive": f"{text(row, 9)} number {row}"} for row, query in enumerate(queries)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return values


@pytest.mark.parametrize(("accumulated", "steps"), [(1, (7, 10, 14)), (2, (3, 5, 7))])
def test_epochs_with_fewer_batches_than_counted_are_gone_on_with_exactly(accumulated, steps, tmp_path, monkeypatch):
    def recipe(name):
        return load_recipe(write(tmp_path, uneven(tmp_path, name, gradient_accumulation_steps=accumulated)))

    whole = training.train(recipe("whole"))
    state = json.loads((last_checkpoint(recipe("whole")) / "trainer_state.json").read_text())
    assert state["global_step"] == state["max_steps"] == whole["steps"] < 3 * math.ceil(9 / accumulated)
    for step in (*steps, whole["steps"] - 1):
        name = f"parts-{step}"
        assert interrupt(recipe(name), monkeypatch, Interrupt(step)) == f"checkpoint-{step + 1}"
        assert training.train(recipe(name))["losses"] == whole["losses"]
        weights = [load_file(tmp_path / part / "model" / "model.safetensors") for part in ("whole", name)]
        assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    with monkeypatch.context() as patch:
        patch.setattr(training, "_run_trainer", None)  # nothing is left to do
        assert training.train(recipe("whole"))["losses"] == whole["losses"]


def test_a_run_that_ends_where_it_was_just_saved_is_finished_and_not_saved_twice(tmp_path, monkeypatch):
    recipe = load_recipe(write(tmp_path, uneven(tmp_path, "out", save_steps=1, save_total_limit=1)))
    save, saved = RecipeTrainer._save_optimizer_and_scheduler, []

    def noting(trainer, folder):
        saved.append(Path(folder).name)
        save(trainer, folder)

    monkeypatch.setattr(RecipeTrainer, "_save_optimizer_and_scheduler", noting)
    whole = training.train(recipe)
    assert saved == [f"checkpoint-{step + 1}" for step in range(whole["steps"])]
    monkeypatch.setattr(training, "_run_trainer", None)
    again = training.train(recipe)
    assert again["losses"] == whole["losses"] and again["resumed_from"] == saved[-1]


def test_a_run_that_ends_without_saving_leaves_its_checkpoint_whole(tmp_path, monkeypatch):
    def recipe(steps):
        return load_recipe(write(tmp_path, uneven(tmp_path, "out", save_steps=steps)))

    steps = training.train(recipe(None))["steps"]
    assert interrupt(recipe(100), monkeypatch, Interrupt(steps - 1)) == f"checkpoint-{steps}"
    for _ in range(2):
        assert training.train(recipe(None))["resumed_from"] == f"checkpoint-{steps}"


def test_where_transformers_counts_by_itself_uneven_epochs_are_not_gone_on_with(tmp_path, monkeypatch):
    recipe = load_recipe(write(tmp_path, uneven(tmp_path, "out")))
    monkeypatch.delattr(RecipeTrainer, "_init_training_state")
    monkeypatch.setattr(epochs, "COUNTS_BATCHES", False)
    assert interrupt(recipe, monkeypatch, Interrupt(5)) == "checkpoint-6"
    # In its first epoch a run is where its steps say.
    assert interrupt(recipe, monkeypatch, Interrupt(10)) == "checkpoint-11"
    with pytest.raises(RecipeError) as error:
        training.train(recipe)
    assert str(error.value) == (
        "training.batch_sampler no_duplicates left fewer batches in an epoch than transformers "
        f"{transformers.__version__} counts when it goes on; install 5.3 or later, or start over with --no-resume."
    )


def test_a_run_that_goes_on_saves_and_logs_as_often_as_is_asked_now(tmp_path, monkeypatch):
    file = write(tmp_path, tiny(tmp_path, training={"save_steps": 100, "save_total_limit": None}))
    assert interrupt(load_recipe(file, ["training.logging_steps=100"]), monkeypatch, Interrupt(3)) == "checkpoint-4"
    result = training.train(load_recipe(file, ["training.save_steps=5", "training.logging_steps=2"]))
    assert [step for step, _ in result["losses"]] == [1, 6, 8, 10, 12, 14]
    saved = sorted(int(path.name.partition("-")[2]) for path in (tmp_path / "out").glob("checkpoint-*"))
    assert saved == [4, 5, 10, 14]


@pytest.mark.parametrize("file", ["optimizer.pt", "scheduler.pt"])
def test_a_checkpoint_without_what_decides_the_next_step_is_not_gone_on_from(file, tmp_path, monkeypatch):
    recipe = load_recipe(write(tmp_path, tiny(tmp_path, training={"max_steps": 8})))
    checkpoint = Path(recipe.output_dir, interrupt(recipe, monkeypatch, Interrupt(4)))
    (checkpoint / file).unlink()
    with pytest.raises(RecipeError) as error:
        training.train(recipe)
    assert str(error.value) == (
        f"output_dir: {checkpoint} has no {file}, without which the training would not go on as it was; bring it back, "
        "choose another output_dir, or start over with --no-resume."
    )
    assert checkpoint.exists()


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.pt", "rng_state.pth", "config.json"])
def test_a_damaged_checkpoint_gets_one_sentence(file, tmp_path, monkeypatch):
    recipe = load_recipe(write(tmp_path, tiny(tmp_path, training={"max_steps": 8})))
    checkpoint = Path(recipe.output_dir, interrupt(recipe, monkeypatch, Interrupt(4)))
    (checkpoint / file).write_bytes((checkpoint / file).read_bytes()[:200])
    with pytest.raises(RecipeError, match=f"^output_dir: {re.escape(str(checkpoint))} cannot be read to go on from"):
        training.train(recipe)
