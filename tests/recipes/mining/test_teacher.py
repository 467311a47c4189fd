import json
import shutil
from pathlib import Path

import pytest
import torch
from pylate.models import ColBERT
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, BertForSequenceClassification

from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.mining import mine as mining_mine
from pylate_fastmaxsim.recipes.mining import negatives
from tests.support.case_tables import case_table
from tests.support.saved_models import LATE


@case_table("""
made | teacher_type | sentence
no tokenizer | cross_encoder | has no tokenizer that can be loaded; it must be saved beside the model.
cut weights | cross_encoder | cannot be loaded: .*model.safetensors is not whole, as after a download .*
three scores | cross_encoder | must give one score a pair, but it gives 3.
ColBERT | cross_encoder
    | must have a scoring head, .* its checkpoint holds no classifier.bias, .*; set mining.teacher_type to colbert.
encoder | colbert | must have a projection, .* its checkpoint holds none, .*; name a trained ColBERT.
cross-encoder | colbert | must have a projection, .* its checkpoint holds none, .*; set mining.teacher_type to cross_encoder.
""")
def test_a_teacher_that_cannot_teach_is_found_before_the_search(
    made, teacher_type, sentence, recipe, encoder, teacher, saved, tmp_path, monkeypatch
):
    source = {"ColBERT": saved(LATE), "encoder": encoder("bert")}.get(made, teacher)
    ignored = shutil.ignore_patterns(*(("tokenizer*", "vocab*") if made == "no tokenizer" else ()))
    folder = Path(shutil.copytree(source, tmp_path / "wrong", ignore=ignored))
    if made == "three scores":
        BertForSequenceClassification(AutoConfig.from_pretrained(teacher, num_labels=3)).save_pretrained(folder)
    if made == "cut weights":
        (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:5000])
    monkeypatch.setattr(mining_mine, "DocumentSearch", None)
    with pytest.raises(RecipeError, match=f"^mining.teacher {folder} {sentence}$"):
        mining_mine.mine(recipe(f"mining.teacher={folder}", f"mining.teacher_type={teacher_type}"))


def test_a_teacher_with_the_projection_of_stanfords_checkpoints_is_taken(recipe, encoder, tmp_path):
    folder = shutil.copytree(encoder("bert"), tmp_path / "stanford")
    weights, config = folder / "model.safetensors", folder / "config.json"
    linear = torch.randn(8, json.loads(config.read_text())["hidden_size"])
    save_file(load_file(weights) | {"linear.weight": linear}, weights, {"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": ["HF_ColBERT"]}))
    section = recipe(f"mining.teacher={folder}", "mining.teacher_type=colbert").mining
    assert callable(mining_mine.load_teacher(section, torch.device("cpu")))


# What has weights of NaN, the stage that finds it, and overrides.
@case_table("""
kind | stage | overrides
model | search |
compressed | search | mining.corpus_format=int8
positives | positives |
cross_encoder | teacher |
colbert | teacher | mining.teacher_type=colbert
""")
def test_scores_of_nan_are_refused(kind, stage, overrides, recipe, encoder, teacher, tmp_path, monkeypatch):
    folder = tmp_path / "lost"
    key = "mining.teacher" if stage == "teacher" else "model.name_or_path"
    if kind == "cross_encoder":
        file = shutil.copytree(teacher, folder) / "model.safetensors"
    else:
        ColBERT(encoder("bert"), embedding_size=8, device="cpu").save_pretrained(str(folder))
        file = folder / "1_Dense" / "model.safetensors"
    save_file({name: value * torch.nan for name, value in load_file(file).items()}, file, {"format": "pt"})
    if kind == "positives":  # as on a GPU, where another batch may overflow
        found = torch.ones(40, 9), torch.arange(9).repeat(40, 1)
        monkeypatch.setattr(negatives, "search", lambda queries, *_: tuple(each[: len(queries)] for each in found))
    said = f"{key} {folder} must give scores that are finite numbers, but some"
    if kind == "compressed":
        said = "mining.corpus_format int8: compress: token vectors must be finite"
    with pytest.raises(RecipeError, match=f"^{said}"):
        mining_mine.mine(recipe(f"{key}={folder}", *overrides.split()))
    assert not list((tmp_path / "mined.unfinished").glob(f"{stage}-*")) and not (tmp_path / "mined").exists()
