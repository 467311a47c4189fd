"""Teachers that cannot teach are found before the search, and scores that are not finite before they are used."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, BertForSequenceClassification

from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.mining import mine as mining_mine
from pylate_fastmaxsim.recipes.mining import negatives
from tests.support.mining_recipe import recipe_for
from tests.support.models import load_model as load_colbert

NO_HEAD = "must have a scoring head, as a cross-encoder has, but its checkpoint holds no classifier.bias, .*"
NO_PROJECTION = "must have a projection, as a ColBERT has, but its checkpoint holds none, .*"


@pytest.mark.parametrize(
    ("kind", "teacher_type", "sentence"),
    [
        ("no tokenizer", "cross_encoder", "has no tokenizer that can be loaded; it must be saved beside the model."),
        ("three scores", "cross_encoder", "must give one score a pair, but it gives 3."),
        ("ColBERT", "cross_encoder", f"{NO_HEAD}set mining.teacher_type to colbert."),
        ("encoder", "colbert", f"{NO_PROJECTION}name a trained ColBERT."),
        ("cross-encoder", "colbert", f"{NO_PROJECTION}set mining.teacher_type to cross_encoder."),
    ],
)
def test_a_teacher_that_cannot_teach_is_found_before_the_search(
    kind, teacher_type, sentence, encoder, teacher, tmp_path, monkeypatch
):
    folder = tmp_path / "wrong"
    if kind == "ColBERT":
        load_colbert(encoder("bert")).save_pretrained(str(folder))
    else:
        ignored = shutil.ignore_patterns(*(("tokenizer*", "vocab*") if kind == "no tokenizer" else ()))
        shutil.copytree(encoder("bert") if kind == "encoder" else teacher, folder, ignore=ignored)
    if kind == "three scores":
        BertForSequenceClassification(AutoConfig.from_pretrained(teacher, num_labels=3)).save_pretrained(folder)
    overrides = [f"mining.teacher={folder}", f"mining.teacher_type={teacher_type}"]
    monkeypatch.setattr(mining_mine, "DocumentSearch", None)
    with pytest.raises(RecipeError, match=f"^mining.teacher {folder} {sentence}$"):
        mining_mine.mine(recipe_for(tmp_path, encoder("modernbert"), teacher, *overrides))


def test_a_teacher_with_the_projection_of_stanfords_checkpoints_is_taken(encoder, tmp_path):
    folder = shutil.copytree(encoder("bert"), tmp_path / "stanford")
    weights, config = folder / "model.safetensors", folder / "config.json"
    linear = torch.randn(8, json.loads(config.read_text())["hidden_size"])
    save_file(load_file(weights) | {"linear.weight": linear}, weights, {"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": ["HF_ColBERT"]}))
    recipe = recipe_for(tmp_path, encoder("bert"), str(folder), "mining.teacher_type=colbert")
    assert callable(mining_mine.load_teacher(recipe.mining, torch.device("cpu")))


@pytest.mark.parametrize("kind", ["model", "positives", "cross_encoder", "colbert"])
def test_scores_that_are_not_finite_are_refused_before_they_are_used(kind, encoder, teacher, tmp_path, monkeypatch):
    folder = tmp_path / "lost"
    if kind == "cross_encoder":
        shutil.copytree(teacher, folder)
        name, file, overrides = "mining.teacher", folder / "model.safetensors", [f"mining.teacher={folder}"]
    else:
        load_colbert(encoder("bert")).save_pretrained(str(folder))
        name, file, overrides = "model.name_or_path", folder / "1_Dense" / "model.safetensors", []
        if kind == "colbert":
            name, overrides = "mining.teacher", [f"mining.teacher={folder}", "mining.teacher_type=colbert"]
    save_file({key: value * torch.nan for key, value in load_file(file).items()}, file, {"format": "pt"})
    model = str(folder) if name == "model.name_or_path" else encoder("modernbert")
    recipe = recipe_for(tmp_path, model, teacher, "model.embedding_size=null", *overrides)
    if kind == "positives":  # as on a GPU, where another batch may overflow
        monkeypatch.setattr(
            negatives, "search", lambda *args: (torch.ones(len(args[0]), 9), torch.arange(9).repeat(len(args[0]), 1))
        )
    with pytest.raises(RecipeError, match=f"^{name} {folder} must give scores that are finite numbers, but some"):
        mining_mine.mine(recipe)
    stage = {"model": "search", "positives": "positives"}.get(kind, "teacher")
    assert not list((tmp_path / "mined.unfinished").glob(f"{stage}-*")) and not (tmp_path / "mined").exists()
