"""Losses and recipes under DeepSpeed, in two real processes on a CPU."""

import importlib.util
import json
import os
import shutil
import subprocess
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.support.paths import RECIPES

# Not imported here: it chooses its device when it is imported, and would do so for the other tests of this process.
if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("needs DeepSpeed: pip install deepspeed", allow_module_level=True)

import torch
from pylate import losses
from safetensors.torch import load_file
from torch import nn

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.encoding import attention as encoding_attention
from pylate_fastmaxsim.integrations.encoding import modes
from pylate_fastmaxsim.integrations.pylate import fused_head
from tests.support import launcher
from tests.support.models import attend_to_own_document, load_model
from tests.support.rank_steps import batch_of
from tests.support.tiny_recipe import fell_back

pytestmark = pytest.mark.process

RANKS = 2
RATE = 0.05

# Which DeepSpeed would look for a GPU; the processes that tests start inherit it.
os.environ["DS_ACCELERATOR"] = "cpu"


def _config(stage: int) -> dict:
    # No weight so small that ZeRO 3 would leave it whole.
    whole = {"stage3_param_persistence_threshold": 0, "stage3_model_persistence_threshold": 0} if stage == 3 else {}
    sizes = ("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps")
    forced = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    return {**dict.fromkeys(sizes, "auto"), **forced, "zero_optimization": {"stage": stage, **whole}}


def _trained(
    folder: str, stage: int, loss_class: type[nn.Module], checkpointing: bool, options: dict
) -> tuple[list[float], dict[str, torch.Tensor], nn.Module]:
    import deepspeed

    os.environ["LOCAL_RANK"] = str(torch.distributed.get_rank())
    core = load_model(f"{folder}/modernbert", document_length=32)
    if checkpointing:
        core[0].auto_model.gradient_checkpointing_enable({"use_reentrant": False})
    sizes = {"train_micro_batch_size_per_gpu": 6, "gradient_accumulation_steps": 1, "train_batch_size": 6 * RANKS}
    optimizer = torch.optim.SGD(core.parameters(), lr=RATE)
    engine, *_ = deepspeed.initialize(model=core, optimizer=optimizer, config=_config(stage) | sizes)
    loss_function = loss_class(engine, **options)
    batch, seen = batch_of(core, torch.distributed.get_rank()), []
    for _ in range(2):
        loss = loss_function([dict(column) for column in batch])
        engine.backward(loss.sum())  # DeepSpeed takes no leaf, which the loss of CachedContrastive is
        engine.step()
        seen.append(loss.item())
    with deepspeed.zero.GatheredParameters(list(core.parameters())):
        weights = {name: weight.detach().clone() for name, weight in core.named_parameters()}
    return seen, weights, core


def _compare(
    folder: str, stage: int, loss_class: type[nn.Module], packed: bool = True, checkpointing: bool = False, **options
) -> None:
    losses_of_stock, stock, _ = _trained(folder, stage, loss_class, checkpointing, options)
    begun = load_model(f"{folder}/modernbert", document_length=32).state_dict()
    if packed:
        encoding_attention.variable_length_attention = attend_to_own_document
    said: list[str] = []
    heard = patch.object(fused_head, "log_once", lambda message, *values, about: said.append(message % values))
    with pylate_fastmaxsim.enabled(stock_masking=True), heard:
        losses_of_ours, ours, core = _trained(folder, stage, loss_class, checkpointing, options)
        assert set(modes.chosen[core].values()) == {"packed" if packed else "grouped"}
        if packed and loss_class is losses.Contrastive:
            assert set(modes.joined[core].values()) == {True}
    assert losses_of_ours == pytest.approx(losses_of_stock, rel=1e-5)
    moved = max((stock[name] - begun[name]).abs().max() for name in stock)
    assert moved > 1e-4
    assert all((ours[name] - weight).abs().max() <= 1e-4 * moved for name, weight in stock.items())
    assert any("(ZeRO 3)" in line for line in said) == bool(said) == (stage == 3)


def _compile_is_left(folder: str) -> None:
    """Hooks between the modules of a layer would end what is compiled, and every one of them be compiled for itself."""
    encoding_attention.variable_length_attention = attend_to_own_document
    with pylate_fastmaxsim.enabled(compile=True):
        _, _, core = _trained(folder, 3, losses.Contrastive, False, {})
    assert all(module._compiled_call_impl is None for module in core.modules())


CASES = {f"zero{stage}": partial(_compare, stage=stage, loss_class=losses.Contrastive) for stage in (0, 2, 3)}
# From ZeRO 2 on DeepSpeed refuses a weight that has gradients of several backwards, stock or fast.
CASES["zero1 cached"] = partial(_compare, stage=1, loss_class=losses.CachedContrastive, mini_batch_size=2)
CASES["zero3 grouped"] = partial(_compare, stage=3, loss_class=losses.Contrastive, packed=False)
CASES["zero3 gathered"] = partial(_compare, stage=3, loss_class=losses.Contrastive, gather_across_devices=True)
CASES["zero3 checkpointing"] = partial(_compare, stage=3, loss_class=losses.Contrastive, checkpointing=True)
CASES["zero3 compile"] = _compile_is_left


@pytest.mark.parametrize("case", CASES)
def test_two_processes(outcomes, case):
    assert outcomes(case) == ["passed"] * RANKS


def _train(stage: int, folder: Path, *overrides: str) -> subprocess.CompletedProcess:
    config = folder / "deepspeed.json"
    config.write_text(json.dumps(_config(stage)))
    small = ["data.packages=[numpy]", "data.max_rows=60", "model.build.hidden_size=16", "evaluation.rows=6"]
    small += ["training.per_device_train_batch_size=3", "training.max_steps=3", "training.save_steps=2"]
    small += ["training.use_cpu=true", f"output_dir={folder / 'run'}", *overrides]
    recipe = RECIPES / "quickstart.yaml"
    command = ["--use_deepspeed", f"--deepspeed_config_file={config}", "-m", "pylate_fastmaxsim.cli", "train"]
    return launcher.run(*command, str(recipe), *(part for override in small for part in ("--set", override)))


@pytest.mark.usefixtures("forked")
def test_a_recipe_saves_whole_models_and_goes_on(tmp_path):
    output = tmp_path / "run"

    def train() -> tuple[dict, dict]:
        done = _train(3, tmp_path)
        said = done.stdout + done.stderr
        assert done.returncode == 0, said[-3000:]
        assert fell_back(said) == ["not fused"]
        return json.loads((output / "train.json").read_text()), load_file(output / "model" / "model.safetensors")

    whole, weights = train()
    for made in ("checkpoint-3", "model"):
        shutil.rmtree(output / made)
    (output / "train.json").unlink()
    parts, again = train()
    assert parts["resumed_from"] == "checkpoint-2" and whole["steps"] == 3
    assert parts["losses"] == whole["losses"] and parts["ndcg@10"] == whole["ndcg@10"]
    assert all(torch.equal(weights[name], again[name]) for name in weights)


@pytest.mark.usefixtures("forked")
def test_a_recipe_whose_loss_has_several_backwards_is_refused(tmp_path):
    done = _train(2, tmp_path, "loss.name=cached_contrastive")
    assert done.returncode != 0
    said = " ".join((done.stdout + done.stderr).split())
    assert "loss.name must not be cached_contrastive under DeepSpeed's ZeRO 2" in said
    assert "has already been reduced" not in said
