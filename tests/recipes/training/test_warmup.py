"""`fastmaxsim warmup`: which steps it takes; that they compile kernels shows on a GPU."""

import importlib
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from pylate_fastmaxsim.integrations.options import current_options
from pylate_fastmaxsim.precompile import calls
from pylate_fastmaxsim.precompile import recipe as warmup_module
from pylate_fastmaxsim.precompile.recipe import batch_sizes, calls_of_recipe, reason_against_warmup, warm_up
from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.models.load import load_model
from pylate_fastmaxsim.recipes.training.inputs import load_data, prepare
from tests.support.recipe_runs import command
from tests.support.recorded_launches import recorded_launches
from tests.support.tiny_recipe import tiny, write

FAST = {"fast": {"enabled": True}, "evaluation": {"rows": 0}}


def test_where_there_is_nothing_to_compile_it_says_so_and_writes_nothing(tmp_path):
    file = write(tmp_path, tiny(tmp_path, **FAST))
    for overrides, environment, said in (
        ([], {}, "tiny trains on a CPU here, where there is nothing to compile."),
        (["fast.enabled=false"], {}, "fast.enabled is false, so there is nothing to compile."),
        ([], {"PYLATE_FASTMAXSIM": "0"}, "PYLATE_FASTMAXSIM=0, so there is nothing to compile."),
    ):
        done = command("warmup", file, *overrides, env=environment)
        assert (done.exit_code, done.output) == (0, f"{said}\n")
    assert not (tmp_path / "out").exists()
    # Kernels of MultiVectorEncoders are left to the steps.
    file = write(tmp_path, tiny(tmp_path, model={"kind": "multi_vector"}))
    assert calls_of_recipe(load_recipe(file), None, None, [4], None) == []


def test_it_takes_two_steps_for_each_size_of_batch_and_leaves_what_is_prepared(tmp_path):
    recipe = tiny(tmp_path, **FAST, training={"per_device_train_batch_size": 8, "dataloader_drop_last": False})
    steps = warm_up(load_recipe(write(tmp_path, recipe))).steps
    assert [step.rows for step in steps] == [8, 4]  # 60 rows
    assert all(step.first > 0 and step.again > 0 for step in steps)
    assert current_options() is None
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["prepared"]


@pytest.mark.cuda
def test_on_a_gpu_training_compiles_nothing_after_it(tmp_path):
    file = write(tmp_path, tiny(tmp_path, **FAST, training={"use_cpu": False, "max_steps": 3}))
    assert reason_against_warmup(load_recipe(file)) is None

    def kernels_after(name):
        environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
        run = [sys.executable, "-m", "pylate_fastmaxsim.cli", name, str(file)]
        done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return set((tmp_path / "cache").rglob("*.cubin")), done.stdout

    compiled, printed = kernels_after("warmup")
    assert {"forward_kernel.cubin", "query_gradient_kernel.cubin"} <= {path.name for path in compiled}
    assert "first step" in printed and "of them before the first step, by" in printed
    assert kernels_after("train")[0] == compiled


LOSSES = {
    "contrastive": "training.seed=1",
    "softmax": "loss.pooling.softmax=0.5",
    "annealed": "loss.pooling={top_k: 1, start: 6, schedule: linear}",
    "stock masking": "fast.stock_masking=true",
    "cached": "loss.name=cached_contrastive loss.mini_batch_size=3",
    "no expansion": "model.do_query_expansion=false",
    "splade": "training.seed=1",
    "splade of long texts": "model.max_seq_length=300",
}


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_compiled_ahead_is_what_the_steps_launch(name, recipe_of, monkeypatch):
    pytest.importorskip("triton")
    for family in ("maxsim", "winner_backward", "pooled", "projection", "splade"):
        importlib.import_module(f"pylate_fastmaxsim.kernels.{family}.launch")
    monkeypatch.setattr(warmup_module, "load_model", _copied)
    if name == "splade of long texts":
        monkeypatch.setattr(warmup_module, "load_data", _of_long_texts)
    common = "fast.enabled=true evaluation.rows=0 training.per_device_train_batch_size=8 "
    common += "training.dataloader_drop_last=false"
    recipe = recipe_of("splade" if name.startswith("splade") else "colbert", f"{common} {LOSSES[name]}")
    prepared = prepare(recipe)
    model = load_model(prepared.model, "cpu", 0)
    rows = load_data(prepared).train
    with recorded_launches(90) as ready:
        for call in calls_of_recipe(recipe, model, rows, batch_sizes(len(rows), recipe), torch.float32):
            calls.run(call, torch.device("cpu"))
    with recorded_launches(90) as launched:
        warm_up(recipe)
    scoring = {program for program in launched if "attention" not in program[0]}
    assert scoring
    assert scoring <= ready, scoring - ready


def _copied(*arguments):
    """As on a GPU, where weights do not begin anywhere in the memory of a file."""
    model = load_model(*arguments)
    for weight in model.parameters():
        weight.data = weight.data.clone()
    return model


def _of_long_texts(prepared):
    data = load_data(prepared)
    return replace(data, train=data.train.map(lambda row: {name: value * 300 for name, value in row.items()}))
