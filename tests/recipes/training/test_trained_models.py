"""What a training leaves: the same losses stock and fast, and models that PyLate loads by itself."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pylate import models

import pylate_fastmaxsim
from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.training import train as training
from tests.support.tiny_recipe import text, tiny, write


@pytest.mark.e2e
def test_stock_and_fast_training_agree_for_every_loss(tmp_path):
    rows = [
        {"query": text(i, 4), "documents": [text(i + j, 3 + (i * j) % 11) for j in range(3)], "scores": [2.0, 1.0, 0.5]}
        for i in range(16)
    ]
    (tmp_path / "kd.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cases = {
        "contrastive": ({"temperature": 0.5}, "pairs.jsonl"),
        "cached_contrastive": ({"mini_batch_size": 2}, "pairs.jsonl"),
        "distillation": ({"normalize_scores": False}, "kd.jsonl"),
    }
    for name, (options, file) in cases.items():
        recipe = tiny(tmp_path, name, loss={"name": name, **options}, data={"files": [str(tmp_path / file)]})
        recipe["model"]["build"]["dropout"] = 0.0
        recipe["training"] |= {"max_steps": 3, "save_steps": None}
        recipe["evaluation"]["rows"] = 4
        path = write(tmp_path, recipe)
        stock = training.train(load_recipe(path))
        fast = training.train(load_recipe(path, ["fast.enabled=true", "fast.stock_masking=true"]))
        losses = [[loss for _, loss in result["losses"]] for result in (stock, fast)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-4), name


def test_the_result_of_a_run_that_diverged_is_json(tmp_path):
    values = tiny(tmp_path, training={"learning_rate": 1e30, "max_grad_norm": 0, "max_steps": 5})
    result = training.train(load_recipe(write(tmp_path, values)))
    losses = [loss for _, loss in result["losses"]]
    assert not all(map(math.isfinite, losses))
    written = json.loads((tmp_path / "out/train.json").read_text(), parse_constant=pytest.fail)
    assert [loss for _, loss in written["losses"]] == [loss if math.isfinite(loss) else None for loss in losses]
    # NaN has an order as well, of which a metric could be made.
    assert result["ndcg@10"] is None and written["ndcg@10"] is None
    assert "ndcg" not in (tmp_path / "out/model/README.md").read_text().lower()
    assert (tmp_path / "out/model/model.safetensors").exists()


LOAD_WITHOUT_US = """
import sys
sys.modules["pylate_fastmaxsim"] = None  # importing it fails
import torch
from pylate.models import ColBERT
for folder in sys.argv[1:]:
    model = ColBERT(folder, device="cpu")
    encoded = [model.encode(["a query"], is_query=True), model.encode(["a document, longer"], is_query=False)]
    torch.save(encoded, folder + "/encoded")
"""


@pytest.mark.process
def test_saved_models_load_in_plain_pylate_and_their_cards_name_the_recipe(tmp_path):
    file = write(tmp_path, tiny(tmp_path), name="my-recipe")
    result = training.train(load_recipe(file, ["fast.enabled=true", "training.max_steps=4"]))
    assert 0 < result["ndcg@10"] <= 1 and json.loads((tmp_path / "out" / "train.json").read_text()) == result
    folders = [Path(result["model"]), tmp_path / "out" / "checkpoint-4"]
    command = [sys.executable, "-c", LOAD_WITHOUT_US, *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    for folder in folders:
        model = models.ColBERT(str(folder), device="cpu")
        ours = [model.encode(["a query"], is_query=True), model.encode(["a document, longer"], is_query=False)]
        assert ours[0][0].shape == (8, 8)
        for (expected,), (got,) in zip(ours, torch.load(folder / "encoded", weights_only=False), strict=True):
            assert got == pytest.approx(expected, abs=1e-6)
        card = (folder / "README.md").read_text()
        assert card.count(f"recipe `my-recipe` of pylate-fastmaxsim {pylate_fastmaxsim.__version__} (PyLate ") == 1
        assert "learning_rate: 0.001" in card and "ColBERT" in card.partition("## Training recipe")[0]
        assert not any("fastmaxsim" in file.read_text() for file in folder.rglob("*.json"))
