"""Evaluations in the training: the best checkpoint, early stopping, and the same steps as without them."""

import json
from pathlib import Path

import pytest
import torch

from pylate_fastmaxsim.recipes.evaluation.evaluate import evaluate
from pylate_fastmaxsim.recipes.models.load import load_trained
from pylate_fastmaxsim.recipes.training import train as training
from pylate_fastmaxsim.recipes.training.inputs import load_data, prepare
from tests.support.page_recipes import PAGES
from tests.support.recipe_kinds import LATE, MARKED
from tests.support.recipe_runs import interrupt, same_model

EVERY_2 = "training.eval_strategy=steps training.eval_steps=2 training.save_steps=2 training.save_total_limit=2"
BEST = f"{EVERY_2} training.load_best_model_at_end=true"


def scripted(monkeypatch, values: list[float]) -> None:
    """Have evaluations after the first one, before the training, give these values of nDCG@10."""
    left = [0.0, *values]
    monkeypatch.setattr(training, "evaluate", lambda *_: {"ndcg@10": left.pop(0) if left else 0.0})


@pytest.mark.parametrize("kind", MARKED)
def test_the_best_checkpoint_is_the_model_also_of_a_run_that_is_over(kind, recipe_of, tmp_path, monkeypatch):
    last, common = (4, "model.lora=null") if kind in PAGES else (6, "training.learning_rate=0.01")
    recipe = recipe_of(kind, f"training.max_steps={last} {common} {BEST}")
    scripted(monkeypatch, [0.9, 0.1, 0.1])
    found = training.train(recipe)
    assert found["steps"] == last and found["before"] == {"ndcg@10": 0.0}
    monkeypatch.undo()
    assert {path.name for path in (tmp_path / "out").glob("checkpoint-*")} == {"checkpoint-2", f"checkpoint-{last}"}
    prepared = prepare(recipe)
    best = load_trained(prepared.model, tmp_path / "out" / "checkpoint-2", "cpu")
    metric = evaluate(prepared, best, load_data(prepared))["ndcg@10"]
    saved = load_trained(prepared.model, Path(found["model"]), "cpu")
    weights = (getattr(each, "model", each).state_dict().values() for each in (saved, best))
    assert all(map(torch.equal, *weights))
    again = training.train(recipe)
    assert again["ndcg@10"] == pytest.approx(metric) and again["steps"] == last
    assert kind in PAGES or "**2**" in Path(found["model"], "README.md").read_text()  # in the log of the training


def test_evaluations_change_no_step_and_stop_early_also_after_an_interruption(recipe_of, tmp_path, monkeypatch):
    plain = training.train(recipe_of(LATE, "training.max_steps=6 training.save_steps=2", "plain"))
    whole = training.train(recipe_of(LATE, f"training.max_steps=6 {EVERY_2}", "whole"))
    assert whole["losses"] == plain["losses"] and same_model(tmp_path / "plain", tmp_path / "whole")
    logged = json.loads((tmp_path / "whole/checkpoint-6/trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in logged if "eval_ndcg@10" in entry] == [0, 2, 4, 6]
    assert whole["before"]["ndcg@10"] == logged[0]["eval_ndcg@10"]
    # The best is step 2; after the interruption one more is as bad as that before it.
    recipe = recipe_of(LATE, f"training.max_steps=14 {EVERY_2} training.early_stopping_patience=2", "parts")
    scripted(monkeypatch, [0.9, 0.1])
    assert interrupt(recipe, step=4) == "checkpoint-5"
    monkeypatch.setattr(training, "evaluate", lambda *_: {"ndcg@10": 0.2})
    stopped = training.train(recipe)
    assert stopped["steps"] == 6 and stopped["resumed_from"] == "checkpoint-5"
    assert training.train(recipe)["steps"] == 6  # it is over
    plateau = f"training.max_steps=14 training.lr_scheduler_type=reduce_lr_on_plateau {EVERY_2}"
    assert training.train(recipe_of(LATE, plateau, "plateau"))["steps"] == 14
