"""Which kind of model a folder holds, told from its files."""

import json

import pytest
import torch
from pylate.models import ColBERT
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from pylate_fastmaxsim import StaticLateInteraction
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.models.load import CONFIG_FILE, load_retriever
from tests.support import models
from tests.support.sparse_encoders import build_sparse_encoder


def edit(folder, **changes):
    """Change the configuration that Sentence Transformers wrote; None removes a key."""
    file = folder / CONFIG_FILE
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def test_a_colbert_of_a_release_that_wrote_no_kind_is_one(encoder, tmp_path):
    models.load_model(encoder("bert")).save_pretrained(str(tmp_path))
    edit(tmp_path, model_type=None)
    assert isinstance(load_retriever(str(tmp_path), "cpu"), ColBERT)


def test_other_models_are_refused_in_one_sentence(encoder, tmp_path):
    def refused(folder, said):
        with pytest.raises(RecipeError, match=said) as caught:
            load_retriever(str(folder), "cpu")
        assert str(folder) in str(caught.value) and "\n" not in str(caught.value)

    wanted = (
        "a MultiVectorEncoder or SparseEncoder that Sentence Transformers has saved or a StaticLateInteraction, but "
    )
    refused(encoder("bert"), f"{wanted}it has no {CONFIG_FILE}")
    dense = tmp_path / "dense"
    SentenceTransformer(encoder("bert"), device="cpu").save_pretrained(str(dense))
    refused(dense, f"{wanted}{CONFIG_FILE} says SentenceTransformer")
    edit(dense, model_type=None)
    refused(dense, f"{wanted}{CONFIG_FILE} says SentenceTransformer")
    colbert = tmp_path / "colbert"
    models.load_model(encoder("bert")).save_pretrained(str(colbert))
    edit(colbert, model_type="MultiVectorEncoder")
    refused(colbert, "is a MultiVectorEncoder, which needs Sentence Transformers 6, but Sentence Transformers 5.* is ")
    (colbert / CONFIG_FILE).write_text("{")
    refused(colbert, "cannot be loaded")
    sparse = build_sparse_encoder(tmp_path, encoder("bert"))
    edit(tmp_path / "model", similarity_fn_name="cosine")
    refused(sparse, r"must score by the inner product \(dot\), but its similarity is cosine")
    (tmp_path / "model" / "modules.json").write_text("[]")
    refused(tmp_path / "nothing", "MODEL: there is no folder")


def test_a_static_model_is_told_by_its_description(tmp_path):
    vectors = torch.eye(3)
    StaticLateInteraction(vectors, tokenizer=Tokenizer(WordLevel({"a": 0})), threshold=0.5).save(tmp_path)
    assert torch.equal(load_retriever(str(tmp_path), "cpu").query_vectors, vectors)
    next(tmp_path.glob("tables-*")).write_bytes(b"{")
    with pytest.raises(RecipeError, match="MODEL .* cannot be loaded: .*tables-.*safetensors is missing or damaged"):
        load_retriever(str(tmp_path), "cpu")
