"""What this machine cannot train is one sentence, before anything is written."""

import pytest
import torch

from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.kind import Kind
from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.training import arguments
from tests.support.case_tables import cases
from tests.support.paths import RECIPES
from tests.support.recipe_runs import command
from tests.support.tiny_recipe import tiny, write

COLQWEN = RECIPES / "colqwen_vidore.yaml"


@pytest.mark.parametrize(
    ("override", "sentence"),
    cases("""
training.report_to=wandb | training.report_to must be auto or none here, because wandb is not installed.
training.optim=adamv | training: adamv is not a valid
training.optim=adamw_8bit | training.optim adamw_8bit cannot be used here: You need to install
training.lr_scheduler_type=cosine_with_min_lr | training.lr_scheduler_type cosine_with_min_lr cannot be used
training.lr_scheduler_type=reduce_lr_on_plateau | training.lr_scheduler_type must not be reduce_lr_on_plat
"""),
)
def test_arguments_that_the_trainer_does_not_take(override, sentence, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.trainer_optimizer.is_bitsandbytes_available", lambda: False)
    monkeypatch.setattr(arguments, "REPORTERS", dict.fromkeys(arguments.REPORTERS, lambda: False))
    done = command("train", write(tmp_path, tiny(tmp_path)), override)
    assert done.exit_code == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"fastmaxsim: {sentence}")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def gpu_without_bf16(monkeypatch):
    """What PyTorch says of a GPU of compute capability 7.5, which emulates bf16."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Tesla T4")


def test_a_gpu_without_bf16(gpu_without_bf16, tmp_path, monkeypatch):
    file = write(tmp_path, tiny(tmp_path))
    done = command("train", file, "training.precision=bf16", "training.use_cpu=false")
    assert done.exit_code == 2 and "must be auto, fp16 or fp32 here, because the GPU (Tesla T4) has no" in done.stderr
    # Private, because no arguments of a GPU can be made without one.
    assert arguments._precision("auto", "auto", on_gpu=True) == "fp16"
    pages = load_recipe(COLQWEN, ["model.dtype=bfloat16", "training.precision=fp16"])
    with pytest.raises(RecipeError, match="model.dtype must be auto or float32 here, because the GPU .* has no bf16."):
        arguments.training_arguments(pages, Kind())
    assert arguments._precision("fp16", "bfloat16", on_gpu=False) == "fp16"
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    assert [arguments._precision("auto", "auto", on_gpu) for on_gpu in (True, False)] == ["bf16", "fp32"]


def test_adapters_on_a_gpu_without_bf16_have_float32_weights(gpu_without_bf16, monkeypatch):
    pytest.importorskip("colpali_engine", reason='needs colpali-engine: pip install -e ".[test]"')
    from pylate_fastmaxsim.recipes.kinds.pages import _dtype  # without a GPU no model can be loaded there

    section = load_recipe(COLQWEN).model
    assert section.dtype == "auto" and _dtype(section, torch.device("cuda")) == torch.float32
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    assert _dtype(section, torch.device("cuda")) == torch.bfloat16
