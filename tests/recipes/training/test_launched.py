"""Training under ``accelerate launch`` with two processes, by DDP and FSDP, goes on after an interrupt."""

import json

import pytest
import torch
from safetensors.torch import load_file

from pylate_fastmaxsim.recipes.load import dump_recipe
from tests.support.launcher import launch
from tests.support.page_recipes import PAGES
from tests.support.tiny_recipe import fell_back, list_rows

LAYERS = {"colpali": "GemmaDecoderLayer"}
# With dropout, so that each process must go on with its own random numbers.
GATHERED = "loss={name: cached_contrastive, mini_batch_size: 2, gather_across_devices: true}"
TEXTS = {"contrastive": "", "gathered": GATHERED}
STREAMED = "data.streaming=true data.negatives_per_query=2 evaluation.rows=0 model.build=null model.name_or_path="
WEIGHTS = {"adapters": "training.save_total_limit=3", "all": "training.save_total_limit=3 model.lora=null"}
# All recipes of a launch are trained by one pair of processes, because starting it takes longer than they do.
# The main process evaluates, and all keep its best.
BEST = "training.eval_strategy=steps training.eval_steps=2 training.load_best_model_at_end=true"
LAUNCHES = [("ddp", "colbert", TEXTS | {"streamed": STREAMED, "best": BEST})]
LAUNCHES += [("fsdp", "colbert", {"gathered": GATHERED})]
LAUNCHES += [("fsdp", "colpali", WEIGHTS)] if PAGES else []


@pytest.mark.process
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(("mode", "kind", "recipes"), LAUNCHES)
def test_an_interrupted_run_goes_on_and_ends_as_an_uninterrupted_one(mode, kind, recipes, recipe_of, encoder, tmp_path):
    files, few = [], "training.per_device_train_batch_size=3 training.max_steps=5 training.save_steps=2"
    for name, overrides in recipes.items():
        overrides, rows = (f"{overrides}{encoder('bert')}", list_rows()) if name == "streamed" else (overrides, None)
        recipe = recipe_of(kind, f"{few} fast.enabled=true {overrides}".strip(), name, rows)
        files.append(tmp_path / f"{name}.yaml")
        files[-1].write_text(dump_recipe(recipe))
    done = launch(mode, tmp_path, files, LAYERS.get(kind, "ModernBertEncoderLayer"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert not fell_back(done.stdout + done.stderr)
    for name in recipes:
        whole, parts = (json.loads((tmp_path / f"{name}-0.json").read_text())[key] for key in ("whole", "parts"))
        assert whole["steps"] == len(whole["losses"]) == 5 and whole["fast"]["enabled"]
        assert parts["resumed_from"] == "checkpoint-2"
        file = "adapter_model.safetensors" if name == "adapters" else "model.safetensors"
        weights = [load_file(tmp_path / f"{name}-{part}" / "model" / file) for part in ("whole", "parts")]
        if (mode, kind) == ("fsdp", "colbert"):
            # In a new process FSDP gathers weights to other addresses, and by their alignment a CPU's products round.
            assert parts["ndcg@10"] == pytest.approx(whole["ndcg@10"], abs=0.05)
            torch.testing.assert_close(torch.tensor(parts["losses"]), torch.tensor(whole["losses"]), rtol=1e-4, atol=0)
            torch.testing.assert_close(*weights, rtol=1e-3, atol=1e-4)
        else:
            assert parts["losses"] == whole["losses"] and parts.get("ndcg@10") == whole.get("ndcg@10")
            torch.testing.assert_close(*weights, rtol=0, atol=0)
        made = list((tmp_path / f"{name}-whole").glob("prepared/*/model"))
        for base in [] if name == "adapters" else [recipe.model.name_or_path] if kind in PAGES else made:
            (key,) = (key for key in weights[0] if key.endswith(("embed_tokens.weight", "tok_embeddings.weight")))
            assert not torch.equal(weights[0][key], load_file(f"{base}/model.safetensors")[key])
    first, second = (set(json.loads((tmp_path / f"written-{rank}.json").read_text())) for rank in (0, 1))
    assert not {path for path in first & second if not path.endswith(".lock") and not path.startswith("/dev/")}
    assert any(path.endswith("train.json") for path in first)
    assert any(path.endswith("model/model.safetensors") for path in first)
    assert not any(path.endswith(".safetensors") for path in second)
