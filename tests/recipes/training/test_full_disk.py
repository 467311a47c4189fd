"""A disk that is full ends a command in one clear sentence, and nothing that was computed is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("pylate")

import torch
import yaml
from safetensors.torch import load_file
from test_mining import recipe_for, teacher  # noqa: F401  (a fixture)
from test_misuse import command, last_line
from tiny_recipe import hub_dataset, kd_subsets, tiny, write

from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.training import train as training
from pylate_fastmaxsim.recipes.training.prepare import prepare

# From some moment on no file may grow beyond a limit: the system's own error, met in the middle of a write.
FULL_DISK = """
import os, resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
limit = int(sys.argv.pop(1))
when = sys.argv.pop(1)

def full():
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

if when.startswith("step"):
    from pylate_fastmaxsim.recipes import train
    from transformers import TrainerCallback

    class Full(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == int(when[4:]):
                full()

    build = train.build_trainer

    def build_trainer(*args, **kwargs):
        trainer = build(*args, **kwargs)
        trainer.add_callback(Full())
        return trainer

    train.build_trainer = build_trainer
elif "." in when:
    import importlib
    name, _, function = when.rpartition(".")
    module = importlib.import_module("pylate_fastmaxsim.recipes." + name)
    called = getattr(module, function)
    setattr(module, function, lambda *args: (full(), called(*args))[1])
else:
    full()
from pylate_fastmaxsim.cli import main
main()
"""


def on_a_full_disk(limit: int, when: str, name: str, recipe: Path, **variables: str) -> subprocess.CompletedProcess:
    arguments = [sys.executable, "-c", FULL_DISK, str(limit), when, name, str(recipe)]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=300, env=os.environ | variables)


# The model has 27 KB, the optimizer's state 42: the limits fall into a JSON file, the weights and the optimizer.
@pytest.mark.parametrize("limit", [0, 20_000, 36_000])
def test_a_full_disk_in_training_keeps_the_last_checkpoint(limit, tmp_path):
    file = write(tmp_path, tiny(tmp_path))
    failed = on_a_full_disk(limit, "step5", "train", file)
    out = tmp_path / "out"
    assert failed.returncode == 1 and "Traceback" not in failed.stderr
    assert last_line(failed).startswith("fastmaxsim: ") and " cannot be written" in last_line(failed)
    assert last_line(failed).endswith(f"; {out}/checkpoint-4 is kept, and the same command goes on from there.")
    resumed = training.train(load_recipe(file))
    assert resumed["resumed_from"] == "checkpoint-4"
    whole = training.train(load_recipe(write(tmp_path, tiny(tmp_path, "whole"))))
    assert resumed["losses"] == whole["losses"]
    weights = [load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "out")]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


def test_a_full_disk_before_the_first_step_leaves_nothing_behind(tmp_path):
    recipe = tiny(tmp_path)
    failed = on_a_full_disk(1000, "start", "train", write(tmp_path, recipe))
    assert failed.returncode == 1 and "Traceback" not in failed.stderr
    assert "cannot be written" in last_line(failed)
    assert last_line(failed).endswith("; there is no checkpoint yet, and the same command starts again.")
    assert not (tmp_path / "out").exists()


def test_a_full_disk_in_a_comparison(tmp_path):
    recipe = tiny(tmp_path, training={"max_steps": 2})
    prepare(load_recipe(write(tmp_path, recipe)))
    failed = on_a_full_disk(100, "start", "compare", write(tmp_path, recipe))
    assert failed.returncode == 1 and "Traceback" not in failed.stderr
    assert last_line(failed).startswith("fastmaxsim: ") and "cannot be written" in last_line(failed)


# The last two in the middle of what datasets writes, which fails once more when it closes its file.
@pytest.mark.parametrize(
    ("when", "limit"),
    [("start", 100), ("mining.mine.grade", 100), ("mining.mine.write_data", 10), ("mining.mine.write_data", 1000)],
)
def test_a_full_disk_in_mining_keeps_what_is_mined(when, limit, encoder, teacher, tmp_path):  # noqa: F811
    recipe = recipe_for(tmp_path, encoder("modernbert"), teacher)
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(asdict(recipe)))
    failed = on_a_full_disk(limit, when, "mine", file)
    assert failed.returncode == 1 and "Traceback" not in failed.stderr
    assert "cannot be written: File too large" in last_line(failed)
    assert last_line(failed).endswith("; what is done is kept, and the same command goes on from there.")
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "mined.unfinished").glob("search-*")}
    assert len(kept) == (0 if when == "start" else 3)
    done = command("mine", file)
    assert done.exit_code == 0 and (tmp_path / "mined" / "mining.json").exists()
    # The bar begins where the first run stopped.
    assert ("100%|██████████| 40.0/40.0 [00:00<?" in done.stderr) == (when != "start")


@pytest.mark.parametrize("limit", [10, 400])
def test_a_full_disk_while_document_ids_are_looked_up(limit, tmp_path):
    recipe = tiny(tmp_path, loss={"name": "distillation"}, evaluation={"rows": 0})
    recipe["data"] = {"source": "distillation", "name": str(hub_dataset(tmp_path / "kd", **kd_subsets()))}
    file = write(tmp_path, recipe)
    cache = str(tmp_path / "cache")  # of its own, where no table of ids is yet
    failed = on_a_full_disk(limit, "data.distillation._number_of_ways", "train", file, HF_DATASETS_CACHE=cache)
    assert failed.returncode == 1 and "Traceback" not in failed.stderr
    assert "cannot be written: File too large; there is no checkpoint yet" in last_line(failed)


def test_an_error_of_another_kind_is_not_taken_for_a_full_disk(tmp_path, monkeypatch):
    def broken(*args):
        raise RuntimeError("shape mismatch")

    monkeypatch.setattr(training, "build_trainer", broken)
    done = command("train", write(tmp_path, tiny(tmp_path)))
    assert isinstance(done.exception, RuntimeError)
