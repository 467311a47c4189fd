import errno
import json
import math
import signal
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from huggingface_hub import HfApi
from safetensors import SafetensorError
from transformers import Trainer

from pylate_fastmaxsim.cli.recipes import advice_on_memory
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.trainers import callbacks
from pylate_fastmaxsim.recipes.trainers.sharded import RecipeTrainer, TextTrainerMixin
from pylate_fastmaxsim.recipes.training import train as training
from pylate_fastmaxsim.recipes.training.run_directory import last_checkpoint
from tests.support.case_tables import case_table
from tests.support.power_cut import content, states
from tests.support.recipe_runs import command, interrupt, same_model
from tests.support.tiny_recipe import split_overrides, text, tiny, write


def without_checkpoints(folder, output: str = "out"):
    return write(folder, tiny(folder, output, training={"max_steps": 3, "save_steps": None, "eval_on_start": False}))


def test_a_run_that_goes_on_saves_and_logs_at_the_intervals_of_now(tmp_path):
    file = write(tmp_path, tiny(tmp_path, training={"save_steps": 100, "save_total_limit": None}))
    assert interrupt(load_recipe(file, ["training.logging_steps=100"]), step=3) == "checkpoint-4"
    result = training.train(load_recipe(file, ["training.save_steps=5", "training.logging_steps=2"]))
    assert [step for step, _ in result["losses"]] == [1, 6, 8, 10, 12, 14]
    saved = sorted(int(path.name.partition("-")[2]) for path in (tmp_path / "out").glob("checkpoint-*"))
    assert saved == [4, 5, 10, 14]


def test_the_model_is_saved_before_it_is_evaluated(tmp_path, monkeypatch, caplog):
    whole = training.train(load_recipe(without_checkpoints(tmp_path, "whole")))
    file, out = without_checkpoints(tmp_path), tmp_path / "out"
    out.mkdir()
    (out / "train.json").write_text('{"ndcg@10": 1.0}')  # of an earlier run
    monkeypatch.setattr(training, "evaluate", mock.Mock(side_effect=KeyboardInterrupt))
    assert command("train", file).exit_code == 130
    assert f"the trained model is in {out}/model" in caplog.messages[-1]
    assert same_model(tmp_path / "whole", out)
    result = json.loads((out / "train.json").read_text())
    assert result["losses"] == whole["losses"] and "ndcg@10" not in result
    card = (out / "model" / "README.md").read_text()
    assert card.count("## Training recipe") == 1 and "ndcg@10" not in card
    full = torch.OutOfMemoryError("CUDA out of memory.\nMore.")
    monkeypatch.setattr(training, "evaluate", mock.Mock(side_effect=full))
    done = command("train", file)
    said = "fastmaxsim: evaluation.batch_size of 32 is more than fits into memory; the trained model is in "
    assert done.exit_code == 2 and done.stderr.splitlines()[-1].startswith(said)


def test_kills_and_power_cuts_leave_a_model_whole_and_no_metrics_of_another(tmp_path, monkeypatch):
    recipe, out, given = load_recipe(without_checkpoints(tmp_path)), tmp_path / "out", []
    replace_folder, evaluated = training.replace_folder, training.evaluate
    monkeypatch.setattr(training, "replace_folder", lambda *args: given.extend(args) or replace_folder(*args))
    monkeypatch.setattr(training, "evaluate", lambda *args: given.append(args[1]) or evaluated(*args))
    training.train(recipe)
    folder, write_model, model = given
    (folder / "adapter_config.json").write_text("{}")  # of a model of other files

    def files(state: dict) -> dict:
        return {name: each for name, each in state.items() if name.startswith("model/")}

    before = content(out)
    with torch.no_grad():
        next(model.parameters()).add_(1)
    found = states(out, lambda: replace_folder(folder, write_model), cuts=5)
    after = content(out)
    assert "model/adapter_config.json" not in after
    left = sorted(path.name for path in out.iterdir())
    assert left == ["model", "prepared", "recipe-of-checkpoints.yaml", training.LOCK_FILE]
    assert files(before) != files(after) and len(found) > 50
    for _, state in found:
        assert files(state) in (files(before), files(after)) and len(files(state)) > 5
        assert files(state) == files(before) or state.get("train.json") != before["train.json"]


def test_a_training_that_is_over_keeps_its_card_and_what_it_was_trained_with(tmp_path, monkeypatch):
    # As where the model that a training began with is on the Hub.
    info = "sentence_transformers.model_card.get_model_info"
    monkeypatch.setattr(info, lambda name: SimpleNamespace(id=name, sha="1"))
    file, out = write(tmp_path, tiny(tmp_path, training={"max_steps": 4})), tmp_path / "out"
    first = training.train(load_recipe(file))
    assert json.loads((out / "train.json").read_text()) == first and first["ndcg@10"] > 0
    card = (out / "model" / "README.md").read_text()
    assert card.count("## Evaluation") == 1 and "base_model: " in card
    assert "ndcg@10" in card.partition("## Training recipe")[0]
    changed = training.train(load_recipe(file, ["name=other", "fast.enabled=true", "evaluation.batch_size=8"]))
    assert (changed["recipe"], changed["losses"]) == ("other", first["losses"])
    assert changed["fast"] == first["fast"] | {"why_off": "the model was trained without it before"}
    # Only keys that have not their defaults.
    changes = {"recipe `tiny`": "recipe `other`", "name: tiny": "name: other", "rows: 24": "rows: 24\n  batch_size: 8"}
    for old, new in changes.items():
        card = card.replace(old, new)
    assert (out / "model" / "README.md").read_text() == card


@pytest.mark.e2e
def test_errors_in_a_step_say_what_is_kept_and_leave_ctrl_c_as_it_was(tmp_path, monkeypatch):
    file, out, step = write(tmp_path, tiny(tmp_path)), tmp_path / "out", RecipeTrainer.training_step
    full, kept = "No space left on device", f"; {out}/checkpoint-4 is kept"
    in_rust = f"Error while serializing: I/O error: {full} (os error 28)"
    in_torch = RuntimeError("[enforce fail at inline_container.cc:863] . unexpected pos 64 vs 0")
    memory = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB.\nMore lines.")
    for sentence, error in (
        (f"{out}/x: {full}{kept}, and the same command", OSError(errno.ENOSPC, full, f"{out}/x")),
        (f"{in_rust}{kept}, and the same command", SafetensorError(in_rust)),
        (f"a file cannot be written to its end, as on a full disk{kept}", in_torch),
        (f"out of memory{kept}: set training.gradient_checkpointing to true", memory),
    ):

        def failing(trainer, *args, error=error, **kwargs):
            if trainer.state.global_step == 6:
                raise error
            return step(trainer, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(RecipeTrainer, "training_step", failing)
            done = command("train", file)
        assert done.exit_code == 1 and done.stderr.splitlines()[-1].startswith(f"fastmaxsim: {sentence}")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert command("train", file, "training.gradient_checkpointing=true").exit_code == 0
    assert json.loads((out / "train.json").read_text())["resumed_from"] == "checkpoint-4"


def test_a_recipe_without_a_single_batch_is_not_called_trained(tmp_path):
    # Three positives between all rows: no four of them make a batch without duplicates.
    section = {"max_steps": 3, "save_steps": None, "batch_sampler": "no_duplicates"}
    rows = [{"query": f"what is class {i}", "positive": ("yes", "no", "maybe")[i % 3]} for i in range(60)]
    file, out = write(tmp_path, tiny(tmp_path, rows=rows, training=section)), tmp_path / "out"
    with pytest.raises(RecipeError, match="batch_sampler no_duplicates leaves no batch of the rows of data"):
        training.train(load_recipe(file))
    assert not (out / "model").exists() and not (out / "train.json").exists()
    assert training.train(load_recipe(file, ["training.dataloader_drop_last=false"]))["steps"] == 3


def test_normalized_scores_of_two_documents_are_warned_of(tmp_path, caplog):
    rows = [{"query": text(i, 4), "documents": [text(i, 3), text(i, 4)], "scores": [1.0, 0.5]} for i in range(8)]
    values = tiny(tmp_path, rows=rows, loss={"name": "distillation"}, evaluation={"rows": 0}, training={"max_steps": 1})
    file = write(tmp_path, values)
    for value in ("null", "false"):
        caplog.clear()
        training.train(load_recipe(file, [f"loss.normalize_scores={value}"]), resume=False)
        assert ("nothing is learned" in caplog.text) == (value == "null")


@case_table("""
kind | overrides | said
colbert | training.seed=1 | set training.gradient_checkpointing to true, or lower training.per_device_train_batch_size or
colbert | loss.name=cached_contrastive | set training.gradient_checkpointing to true or lower loss.mini_batch_size, or lower
multi_vector | training.gradient_checkpointing=true loss.name=cached_contrastive loss.mini_batch_num_tokens=40
  | lower loss.mini_batch_num_tokens, or lower model.document_length; there is no checkpoint yet
""")
def test_what_takes_less_memory_is_said_in_the_order_of_its_effect(kind, overrides, said, tmp_path):
    recipe = load_recipe(write(tmp_path, tiny(tmp_path, model={"kind": kind})), split_overrides(overrides))
    assert advice_on_memory(recipe, None).startswith(said)


def test_the_result_of_a_run_that_diverged_is_json(tmp_path):
    values = tiny(tmp_path, training={"learning_rate": 1e30, "max_grad_norm": 0, "max_steps": 5})
    result = training.train(load_recipe(write(tmp_path, values)))
    losses = [loss for _, loss in result["losses"]]
    assert not all(map(math.isfinite, losses))
    written = json.loads((tmp_path / "out/train.json").read_text(), parse_constant=pytest.fail)
    assert [loss for _, loss in written["losses"]] == [loss if math.isfinite(loss) else None for loss in losses]
    # NaN has an order as well, of which a metric could be made.
    assert result["ndcg@10"] is None and written["ndcg@10"] is None
    assert "## Evaluation" not in (tmp_path / "out/model/README.md").read_text()


def test_the_final_model_is_pushed_once_with_its_card(tmp_path, monkeypatch):
    pushed = ["training.push_to_hub=true", "training.hub_model_id=model", "training.hub_private_repo=true"]
    file, url = write(tmp_path, tiny(tmp_path, training={"max_steps": 2, "save_steps": 2})), "https://hub/commit/1"
    made = mock.create_autospec(HfApi.create_repo, return_value=SimpleNamespace(repo_id="me/model"))
    sent = mock.create_autospec(HfApi.upload_folder, return_value=SimpleNamespace(commit_url=url))
    monkeypatch.setattr(HfApi, "create_repo", made)
    monkeypatch.setattr(HfApi, "upload_folder", sent)
    assert training.train(load_recipe(file, pushed))["pushed_to"] == url
    made.assert_called_once_with(mock.ANY, "model", private=True, exist_ok=True)
    sent.assert_called_once()
    assert sent.call_args.kwargs["repo_id"] == "me/model"
    card = Path(sent.call_args.kwargs["folder_path"], "README.md").read_text()
    assert "push_to_hub: true" in card and "base_model: /" not in card and "library_name" in card
    monkeypatch.setattr(HfApi, "create_repo", mock.Mock(side_effect=OSError("no token")))
    with pytest.raises(RecipeError, match="^training.push_to_hub: model cannot be made on the Hub: no token"):
        training.train(load_recipe(file, pushed))


def uneven(folder, name: str, **section):
    """A recipe whose epochs have fewer batches than rows would fill: a third of the 36 rows has the same query."""
    options = {"batch_sampler": "no_duplicates", "max_steps": None, "num_train_epochs": 3, "save_steps": 4}
    queries = ["what is late interaction" if row < 12 else f"{text(row, 4)} number {row}" for row in range(36)]
    rows = [{"query": query, "positive": f"{text(row, 9)} number {row}"} for row, query in enumerate(queries)]
    values = tiny(folder, name, rows=rows, training=options | section, evaluation={"rows": 0})
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
    assert interrupt(recipe("parts"), step=step) == f"checkpoint-{step + 1}"
    assert training.train(recipe("parts"))["losses"] == whole["losses"]
    assert same_model(tmp_path / "whole", tmp_path / "parts")
    monkeypatch.setattr(Trainer, "train", None)  # nothing is left to do
    assert training.train(recipe("whole"))["losses"] == whole["losses"]


def test_an_older_transformers_does_not_go_on_after_an_uneven_epoch(tmp_path, monkeypatch):
    recipe = uneven(tmp_path, "out")
    monkeypatch.delattr(TextTrainerMixin, "_init_training_state")
    monkeypatch.setattr(callbacks, "COUNTS_BATCHES", False)
    assert interrupt(recipe, step=5) == "checkpoint-6"
    # In the first epoch the number of steps is enough to go on.
    assert interrupt(recipe, step=10) == "checkpoint-11"
    with pytest.raises(RecipeError, match="no_duplicates made fewer batches in an epoch than transformers .* assumes"):
        training.train(recipe)
