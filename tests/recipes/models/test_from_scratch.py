"""Models that are made from scratch."""

import pytest

pytest.importorskip("pylate")

from pathlib import Path

from pylate import models
from tiny_recipe import tiny, write

from pylate_fastmaxsim.recipes.load import load_recipe
from pylate_fastmaxsim.recipes.training.prepare import prepare


def test_a_built_model_is_the_same_each_time(tmp_path):
    files = []
    for place in ("a", "b"):
        prepared = prepare(load_recipe(write(tmp_path, tiny(tmp_path, place))))
        assert prepare(load_recipe(write(tmp_path, tiny(tmp_path, place)))) == prepared
        files.append(Path(prepared.model.name_or_path))
    assert [path.name for path in (tmp_path / "a" / "prepared").iterdir()] == [files[0].parent.name]
    for name in ("model.safetensors", "1_Dense/model.safetensors", "tokenizer.json"):
        assert (files[0] / name).read_bytes() == (files[1] / name).read_bytes()
    model = models.ColBERT(str(files[0]), device="cpu")
    assert model.tokenizer.unk_token_id not in model.skiplist
    assert (model.query_length, model.document_length) == (8, 24)
