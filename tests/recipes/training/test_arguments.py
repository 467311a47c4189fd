"""Arguments of the trainer, and what this machine cannot train."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.kind import Kind
from pylate_fastmaxsim.recipes.load import dump_recipe, load_recipe
from pylate_fastmaxsim.recipes.models.load import kind_of
from pylate_fastmaxsim.recipes.training import arguments
from tests.support.paths import RECIPES
from tests.support.recipe_runs import command
from tests.support.tiny_recipe import tiny, write

COLQWEN = RECIPES / "colqwen_vidore.yaml"


def test_arguments_of_the_trainer_reach_it_and_survive_a_round_trip(tmp_path):
    given = (
        "warmup_ratio=1e-1 bf16=true eval_strategy=no run_name=mine adam_beta2=0.9 report_to=[none] push_to_hub=true"
    )
    overrides = [f"training.{each}" for each in [*given.split(), "hub_model_id=a/b", "optim_args='a=1'"]]
    recipe = load_recipe(write(tmp_path, tiny(tmp_path)), overrides)
    (tmp_path / "dumped.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(tmp_path / "dumped.yaml") == replace(recipe, name="tiny")
    made = arguments.training_arguments(recipe, kind_of(recipe.model))
    assert (made.get_warmup_steps(50), made.bf16, made.eval_strategy, made.run_name) == (5, True, "no", "mine")
    assert (made.adam_beta2, made.optim_args, made.report_to) == (0.9, "a=1", [])
    assert not made.push_to_hub  # train itself pushes the final model


@pytest.fixture
def gpu_without_bf16(monkeypatch):
    """What PyTorch says of a GPU of compute capability 7.5, which emulates bf16."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Tesla T4")


def precision_of(*overrides: str) -> str:
    """The precision that the trainer is asked for, whose arguments cannot be made without the GPU."""
    asked = {}

    class Recorded(Kind):
        arguments_class = staticmethod(lambda **options: asked.update(options) or SimpleNamespace())

    with pytest.raises(AttributeError):
        arguments.training_arguments(load_recipe(COLQWEN, overrides), Recorded())
    return next((name for name in ("bf16", "fp16") if asked[name]), "fp32")


def test_a_gpu_without_bf16(gpu_without_bf16, tmp_path, monkeypatch):
    file = write(tmp_path, tiny(tmp_path))
    done = command("train", file, "training.precision=bf16", "training.use_cpu=false")
    assert done.exit_code == 2 and "must be auto, fp16 or fp32 here, because the GPU (Tesla T4) has no" in done.stderr
    assert precision_of() == "fp16"
    with pytest.raises(RecipeError, match="model.dtype must be auto or float32 here, because the GPU .* has no bf16."):
        precision_of("model.dtype=bfloat16", "training.precision=fp16")
    assert precision_of("model.dtype=bfloat16", "training.precision=fp16", "training.use_cpu=true") == "fp16"
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    assert (precision_of(), precision_of("training.use_cpu=true")) == ("bf16", "fp32")


@pytest.mark.parametrize(("supported", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
def test_adapters_on_a_gpu_without_bf16_have_float32_weights(supported, dtype, gpu_without_bf16, monkeypatch):
    pytest.importorskip("colpali_engine", reason='needs colpali-engine: pip install -e ".[test]"')
    asked = {}
    for name in ("ColQwen2", "ColQwen2Processor"):
        monkeypatch.setattr(f"colpali_engine.models.{name}.from_pretrained", lambda *_, **more: asked.update(more))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: supported)
    section = load_recipe(COLQWEN).model
    with pytest.raises(AttributeError):  # no model is there
        kind_of(section).load(section, "cuda", "model", "base")
    assert section.dtype == "auto" and asked["dtype"] == dtype
