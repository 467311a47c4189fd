"""Models that cannot be loaded or trained are one sentence that names the key."""

from __future__ import annotations

import shutil

import pytest
import torch
from pylate.models import ColBERT, Dense

from pylate_fastmaxsim.recipes.config.kinds import ColBERTSection, MultiVectorSection
from pylate_fastmaxsim.recipes.config.schema import DataSection, MiningSection
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.mining.teacher import load_teacher
from pylate_fastmaxsim.recipes.models.load import load_model
from tests.support.recipe_runs import command
from tests.support.tiny_recipe import tiny, write


def recipe_with(model: dict, folder):
    values = tiny(folder, training={"max_steps": 1, "save_steps": None}, evaluation={"rows": 0})
    return write(folder, values | {"model": model})


def test_a_model_without_a_tokenizer(encoder, tmp_path):
    model = shutil.copytree(encoder("bert"), tmp_path / "model")
    for file in model.glob("tokenizer*"):
        file.unlink()
    done = command("train", recipe_with({"name_or_path": str(model)}, tmp_path))
    assert done.exit_code == 2 and f"model.name_or_path {model} has no tokenizer that can be loaded" in done.stderr
    assert not (tmp_path / "out").exists()


def test_weights_that_were_cut_short(encoder, tmp_path):
    model = shutil.copytree(encoder("modernbert"), tmp_path / "model")
    file = model / "model.safetensors"
    for content in (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", file.read_bytes()[:5000]):
        file.write_bytes(content)
        with pytest.raises(RecipeError, match=f"^model.name_or_path {model} cannot be loaded: {file} is not whole"):
            load_model(ColBERTSection(name_or_path=str(model)), "cpu", seed=0)
    with pytest.raises(RecipeError, match=f"^mining.teacher {model} cannot be loaded: {file} is not whole"):
        load_teacher(MiningSection(pairs=DataSection("hub"), teacher=str(model)), torch.device("cpu"))


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("model.build.intermediate_size=99999999999999999999", "model cannot be built: "),
        ("model.config_kwargs={attention_dropout: high}", "model cannot be built: "),
        ("model.query_length=100000", "model.query_length must be at most 8192, as many positions as ModernBertModel"),
    ],
)
def test_a_model_that_cannot_be_built(override, sentence, tmp_path):
    done = command("train", write(tmp_path, tiny(tmp_path)), override)
    assert done.exit_code == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"fastmaxsim: {sentence}")
    assert not (tmp_path / "out").exists()


# Tables of 64 positions, of which XLM-R has two before the first token; ModernBERT's rotary ones limit queries only.
@pytest.mark.parametrize(
    ("family", "query_length", "document_length"),
    [("bert", 64, 64), ("xlm-roberta", 62, 62), ("modernbert", 128, None)],
)
def test_lengths_beyond_the_positions_of_the_encoder(family, query_length, document_length, encoder, tmp_path):
    file = recipe_with({"name_or_path": encoder(family), "document_length": 32}, tmp_path)
    limits = {"query_length": query_length, "document_length": document_length}
    for key, limit in limits.items():
        if limit is not None:
            done = command("train", file, f"model.{key}={limit + 1}")
            assert done.exit_code == 2 and done.stderr.count("\n") == 1
            assert done.stderr.startswith(f"fastmaxsim: model.{key} must be at most {limit}")
    assert not (tmp_path / "out").exists()
    largest = [f"model.{key}={limit or 200}" for key, limit in limits.items()]
    assert command("train", file, *largest).exit_code == 0


def test_another_embedding_size_than_that_of_a_trained_projection(encoder, tmp_path):
    trained = ColBERT(encoder("modernbert"), embedding_size=8, device="cpu")
    trained.save(str(tmp_path / "trained"))
    file = recipe_with({"name_or_path": str(tmp_path / "trained")}, tmp_path)
    done = command("train", file, "model.embedding_size=4")
    assert done.exit_code == 2 and "model.embedding_size must be 8 or null, because model.name_or_path" in done.stderr
    trained.append(Dense(8, 4))  # a model with two projections of its own
    trained.save(str(tmp_path / "trained"))
    assert command("train", file, "model.embedding_size=4").exit_code == 0


def test_a_multi_vector_encoder_needs_a_later_release_and_is_not_one_of_pylate(tmp_path):
    (tmp_path / "config_sentence_transformers.json").write_text('{"model_type": "MultiVectorEncoder"}')
    with pytest.raises(
        RecipeError, match="^model.kind multi_vector needs Sentence Transformers 6.*multi-vector,recipes"
    ):
        load_model(MultiVectorSection(name_or_path=str(tmp_path)), "cpu", seed=0)
    with pytest.raises(RecipeError, match="it is a MultiVectorEncoder, which model.kind multi_vector trains"):
        load_model(ColBERTSection(name_or_path=str(tmp_path)), "cpu", seed=0)
