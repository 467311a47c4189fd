"""Recipes trained on GPUs by the commands of the README, the stock way and the fast way."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import SUPPORT

pytest.importorskip("datasets")
pytest.importorskip("pylate")

import torch
from pylate import models
from tiny_recipe import fell_back, tiny, write

pytestmark = [pytest.mark.cuda, pytest.mark.e2e]

FSDP = ["--use_fsdp", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"]
FSDP += ["--fsdp_transformer_layer_cls_to_wrap", "ModernBertEncoderLayer", "--num_machines", "1"]
DEEPSPEED = ["--use_deepspeed", "--num_machines", "1"]
LAUNCHERS = {
    "ddp": ["--multi_gpu", "--num_machines", "1"],
    "fsdp 1": [*FSDP, "--fsdp_version", "1"],
    "fsdp 2": [*FSDP, "--fsdp_version", "2"],
    "zero 2": [*DEEPSPEED, "--zero_stage", "2"],
    "zero 3": [*DEEPSPEED, "--zero_stage", "3"],
}
UNFUSED = (
    "The head is not fused, Dense and normalisation run one after the other: DeepSpeed divides the weights of the model"
)
# Of losses from step to step: the paths round differently, and AdamW carries that on.
TOLERANCES = {"fp32": 2e-3, "bf16": 3e-2, "fp16": 1e-2}
HERE = SUPPORT


def trained(folder: Path, launcher: list[str], precision: str, enabled: bool, **loss) -> dict:
    """What ``fastmaxsim train`` wrote, of an encoder without dropout whose attention a GPU can pack."""
    name = "fast" if enabled else "stock"
    recipe = tiny(
        folder,
        name,
        model={"embedding_size": 32},
        loss={"name": "contrastive", "temperature": 0.5} | loss,
        training={"use_cpu": False, "precision": precision, "per_device_train_batch_size": 8, "max_steps": 8},
        fast={"enabled": enabled, "stock_masking": True},
    )
    recipe["model"]["build"] |= {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "dropout": 0.0}
    command = [sys.executable, "-m"]
    if launcher:
        command += ["accelerate.commands.launch", *launcher, "--num_processes", "2", "--main_process_port", "0"]
        command += ["--mixed_precision", "no", "--dynamo_backend", "no", "-m"]
    command += ["train_with_deadline", "train", str(write(folder, recipe, name))]
    environment = os.environ | ({} if launcher else {"CUDA_VISIBLE_DEVICES": "0"})
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    if not enabled:  # Where a fused-kernel package is installed PyLate would score with that.
        environment["PYLATE_SCORES_BACKEND"] = "torch"
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-8000:]
    said = done.stdout + done.stderr
    if enabled and launcher == LAUNCHERS["zero 3"]:
        # Of all that falls back this alone.
        assert UNFUSED in " ".join(said.split())
        said = " ".join(said.split()).replace(UNFUSED, "")
    assert not fell_back(said)
    return json.loads((folder / name / "train.json").read_text())


def assert_alike(stock: dict, fast: dict, tolerance: float) -> None:
    assert (stock["fast"]["enabled"], fast["fast"]["enabled"]) == (False, True)
    assert [step for step, _ in fast["losses"]] == list(range(1, 9))
    ours, theirs = (torch.tensor([loss for _, loss in result["losses"]]) for result in (fast, stock))
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=0, msg=lambda said: f"{said}\n{ours}\n{theirs}")
    assert fast["ndcg@10"] == pytest.approx(stock["ndcg@10"], abs=0.1)


@pytest.mark.parametrize("precision", TOLERANCES)
@pytest.mark.parametrize("loss", ["contrastive", "cached_contrastive"])
def test_one_gpu(loss, precision, tmp_path):
    options = {"name": loss, "mini_batch_size": 3} if loss == "cached_contrastive" else {}
    if options and precision == "fp16":
        # Or a gradient overflows on one path alone, which then skips a step.
        options["temperature"] = 16.0
    results = [trained(tmp_path, [], precision, enabled, **options) for enabled in (False, True)]
    assert_alike(*results, TOLERANCES[precision])


def test_tf32_of_the_trainer():
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "0"}
    command = [sys.executable, str(HERE / "train_with_tf32.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-8000:]
    assert not fell_back(done.stderr)
    curves = json.loads(done.stdout.splitlines()[-1])
    assert len(curves["fast"]) == 8
    assert curves["fast"] == pytest.approx(curves["stock"], rel=TOLERANCES["fp16"])  # which has the precision of TF32


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", LAUNCHERS)
def test_two_gpus(kind, precision, tmp_path):
    if kind.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs DeepSpeed: pip install deepspeed")
    results = [
        trained(tmp_path, LAUNCHERS[kind], precision, enabled, gather_across_devices=True) for enabled in (False, True)
    ]
    assert_alike(*results, TOLERANCES[precision])
    model = models.ColBERT(str(tmp_path / "fast" / "model"), device="cpu")
    assert all(weight.isfinite().all() for weight in model.parameters())
