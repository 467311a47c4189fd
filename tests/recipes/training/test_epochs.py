"""Epochs with fewer batches than the trainer counts, as ``no_duplicates`` makes them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from transformers import Trainer

from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.trainers import callbacks as epochs
from pylate_fastmaxsim.recipes.trainers.sharded import RecipeTrainer, TextTrainerMixin
from pylate_fastmaxsim.recipes.training import train as training
from pylate_fastmaxsim.recipes.training.run_directory import last_checkpoint
from tests.support.recipe_runs import interrupt, same_model
from tests.support.tiny_recipe import json_lines, text, tiny, write


def uneven(folder: Path, name: str, **section):
    """A recipe whose epochs have fewer batches than rows would fill: a third of the 36 rows has the same query."""
    options = {"batch_sampler": "no_duplicates", "max_steps": None, "num_train_epochs": 3, "save_steps": 4}
    values = tiny(folder, name, training=options | section, evaluation={"rows": 0})
    queries = ["what is late interaction" if row < 12 else f"{text(row, 4)} number {row}" for row in range(36)]
    rows = [{"query": query, "positive": f"{text(row, 9)} number {row}"} for row, query in enumerate(queries)]
    json_lines(folder / "pairs.jsonl", rows)
    return load_recipe(write(folder, values))


# In the second epoch, and before the last step.
@pytest.mark.e2e
@pytest.mark.parametrize(("accumulated", "step"), [(2, 5), (1, -1)])
def test_a_run_goes_on_with_the_next_batch_and_is_finished_after_its_epochs(accumulated, step, tmp_path, monkeypatch):
    def recipe(name):
        return uneven(tmp_path, name, gradient_accumulation_steps=accumulated)

    whole = training.train(recipe("whole"))
    state = json.loads((last_checkpoint(recipe("whole")) / "trainer_state.json").read_text())
    assert state["global_step"] == state["max_steps"] == whole["steps"] < 3 * math.ceil(9 / accumulated)
    step %= whole["steps"]
    assert interrupt(recipe("parts"), monkeypatch, step=step) == f"checkpoint-{step + 1}"
    assert training.train(recipe("parts"))["losses"] == whole["losses"]
    assert same_model(tmp_path / "whole", tmp_path / "parts")
    monkeypatch.setattr(Trainer, "train", None)  # nothing is left to do
    assert training.train(recipe("whole"))["losses"] == whole["losses"]


def test_the_last_step_is_not_saved_twice(tmp_path, monkeypatch):
    recipe = uneven(tmp_path, "out", save_steps=1, save_total_limit=1, num_train_epochs=1)
    save, saved = RecipeTrainer._save_optimizer_and_scheduler, []

    def noting(trainer, folder):
        saved.append(Path(folder).name)
        save(trainer, folder)

    monkeypatch.setattr(RecipeTrainer, "_save_optimizer_and_scheduler", noting)
    whole = training.train(recipe)
    assert saved == [f"checkpoint-{step + 1}" for step in range(whole["steps"])]
    monkeypatch.setattr(Trainer, "train", None)
    assert training.train(recipe)["resumed_from"] == saved[-1]


def test_an_older_transformers_does_not_go_on_after_an_uneven_epoch(tmp_path, monkeypatch):
    recipe = uneven(tmp_path, "out")
    monkeypatch.delattr(TextTrainerMixin, "_init_training_state")
    monkeypatch.setattr(epochs, "COUNTS_BATCHES", False)
    assert interrupt(recipe, monkeypatch, step=5) == "checkpoint-6"
    # In the first epoch the number of steps is enough to go on.
    assert interrupt(recipe, monkeypatch, step=10) == "checkpoint-11"
    with pytest.raises(RecipeError, match="no_duplicates made fewer batches in an epoch than transformers .* assumes"):
        training.train(recipe)
