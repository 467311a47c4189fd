"""The SPLADE of a recipe: of a masked language model or saved before, with a route for queries or without."""

from __future__ import annotations

import pytest
import torch
from pylate.models import ColBERT
from sentence_transformers import SentenceTransformer, SparseEncoder
from sentence_transformers.models import Transformer

from pylate_fastmaxsim.recipes.config.kinds import MODELS, SpladeSection
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.models.load import load_model, load_trained
from tests.support.sparse_encoders import build_sparse_encoder

TEXTS = ["late interaction scores every query token", "and writes no similarity tensor", "late"]


@pytest.fixture(scope="module")
def saved(encoder, tmp_path_factory) -> str:
    return build_sparse_encoder(tmp_path_factory.mktemp("sparse"), encoder("bert"))


def section(name: str, **keys) -> SpladeSection:
    return SpladeSection(name_or_path=name, **keys)


def test_a_masked_language_model_and_a_saved_model_are_those_of_sentence_transformers(saved):
    mlm = saved.removesuffix("model") + "mlm"
    expected = SparseEncoder(saved, device="cpu").encode(TEXTS).to_dense()
    for name in (saved, mlm):
        assert torch.equal(load_model(section(name), "cpu", seed=0).encode(TEXTS).to_dense(), expected)
    short = load_model(section(mlm, max_seq_length=4, config_kwargs={"hidden_dropout_prob": 0.0}), "cpu", seed=0)
    assert short.tokenize(TEXTS)["input_ids"].shape == (3, 4)
    assert short[0].auto_model.config.hidden_dropout_prob == 0.0
    with pytest.raises(
        RecipeError, match="model.max_seq_length must be at most 512, as many positions as BertForMasked"
    ):
        load_model(section(mlm, max_seq_length=513), "cpu", seed=0)


def test_an_inference_free_model_weighs_the_tokens_of_a_query_and_survives_a_checkpoint(saved, tmp_path):
    keys = section(saved, inference_free=True, max_seq_length=6)
    model = load_model(keys, "cpu", seed=0)
    with torch.no_grad():
        model[0].sub_modules["query"][0].weight.copy_(torch.arange(len(model.tokenizer)))
    model.save_pretrained(str(tmp_path / "checkpoint"))
    again = load_trained(keys, tmp_path / "checkpoint", "cpu")
    queries = again.encode_query(TEXTS).to_dense()
    for query, ids in zip(queries, model.tokenizer(TEXTS, add_special_tokens=False)["input_ids"], strict=True):
        assert query.nonzero().flatten().tolist() == sorted(set(ids))
        assert torch.equal(query[ids], torch.tensor(ids).float())
    expected = SparseEncoder(saved, device="cpu")
    expected.max_seq_length = 6
    assert torch.equal(again.encode_document(TEXTS).to_dense(), expected.encode(TEXTS).to_dense())
    with pytest.raises(
        RecipeError, match="model.inference_free must be true for output_dir .*, which has a route for q"
    ):
        load_trained(section(saved), tmp_path / "checkpoint", "cpu")


def test_other_models_are_refused(encoder, saved, tmp_path):
    # Sentence Transformers would put an untrained sparse autoencoder on a dense model.
    dense = tmp_path / "dense"
    SentenceTransformer(modules=[Transformer(encoder("bert"))], device="cpu").save_pretrained(str(dense))
    cosine = SparseEncoder(saved, device="cpu")
    cosine.similarity_fn_name = "cosine"
    cosine.save_pretrained(str(tmp_path / "cosine"))
    for name, sentence in {
        dense: "must be a masked language model, or a SparseEncoder with SpladePooling, but has the modules Transformer",
        tmp_path / "cosine": r"must score by the inner product \(dot\), but its similarity is cosine.",
    }.items():
        with pytest.raises(RecipeError, match=sentence):
            load_model(section(str(name)), "cpu", seed=0)


def test_a_model_of_the_other_kind_is_named(saved, encoder, tmp_path):
    ColBERT(encoder("bert"), device="cpu").save_pretrained(str(tmp_path))
    for kind, name, sentence in (
        ("colbert", saved, "it is a SparseEncoder, which model.kind splade trains."),
        ("splade", str(tmp_path), "it is a ColBERT, which model.kind colbert trains."),
    ):
        with pytest.raises(RecipeError, match=f"{name} does not fit model.kind {kind}: {sentence}"):
            load_model(MODELS[kind](name_or_path=name), "cpu", seed=0)
