"""Training under ``accelerate launch`` with two processes, by DDP and FSDP, goes on after an interrupt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.launcher import launch
from tests.support.recipe_runs import same_model
from tests.support.tiny_recipe import fell_back, tiny, write

pytestmark = pytest.mark.process

LOSSES = {
    "contrastive": {"name": "contrastive"},
    "gathered": {"name": "cached_contrastive", "mini_batch_size": 2, "gather_across_devices": True},
}


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def folder(request, tmp_path_factory) -> Path:
    """All recipes in one pair of processes, because starting it takes longer than they do."""
    folder = tmp_path_factory.mktemp("launched")
    # With dropout, so that each process must go on with its own random numbers.
    training = {"per_device_train_batch_size": 3, "max_steps": 5, "save_steps": 2}
    recipes = [
        write(folder, tiny(folder, loss=loss, training=training, fast={"enabled": True}), name)
        for name, loss in LOSSES.items()
    ]
    done = launch(request.param, folder, recipes)
    assert done.returncode == 0, done.stderr[-3000:]
    assert not fell_back(done.stdout + done.stderr)
    return folder


@pytest.mark.parametrize("name", LOSSES)
def test_an_interrupted_run_goes_on_and_ends_as_an_uninterrupted_one(name, folder, request):
    whole, parts = (json.loads((folder / f"{name}-0.json").read_text())[key] for key in ("whole", "parts"))
    assert whole["steps"] == len(whole["losses"]) == 5 and whole["fast"]["enabled"]
    assert parts["resumed_from"] == "checkpoint-2"
    outputs = [folder / f"{name}-{part}" for part in ("whole", "parts")]
    if request.node.callspec.params["folder"] == "fsdp":
        # In a new process FSDP gathers weights to other addresses, and by their alignment a CPU's products round.
        assert parts["ndcg@10"] == pytest.approx(whole["ndcg@10"], abs=0.05)
        for (step, loss), (expected_step, expected) in zip(parts["losses"], whole["losses"], strict=True):
            assert step == expected_step and loss == pytest.approx(expected, rel=1e-4)
        weights = [load_file(output / "model" / "model.safetensors") for output in outputs]
        torch.testing.assert_close(*weights, rtol=1e-3, atol=1e-4)
        return
    assert parts["losses"] == whole["losses"] and parts["ndcg@10"] == whole["ndcg@10"] is not None
    assert same_model(*outputs)


def test_no_two_processes_write_the_same_file(folder):
    first, second = (set(json.loads((folder / f"written-{rank}.json").read_text())) for rank in (0, 1))
    assert not {path for path in first & second if not path.endswith(".lock") and not path.startswith("/dev/")}
    assert all(any(path.endswith(name) for path in first) for name in ("train.json", "model/model.safetensors"))
    assert not any(path.endswith(".safetensors") for path in second)
