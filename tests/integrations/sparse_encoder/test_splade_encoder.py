"""Embeddings of a SPLADE model without vocabulary logits: what stock gives, and what is left to it."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("sentence_transformers", minversion="5.1", reason="no SPLADE by the flag before it")

from sentence_transformers.sparse_encoder import losses
from sparse_encoders import FAMILIES, splade, transformer_of
from splade_steps import TEXTS, Decoded, assert_as_stock, batch_of, splade_loss

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.encoding import modes as encoding_modes
from pylate_fastmaxsim.integrations.models.hidden_states import hidden_states_of

STOCK = "Vocabulary logits are computed for every token, as stock Sentence Transformers does: "


@pytest.fixture
def model(encoder):
    return splade(encoder("bert", masked_lm=True))


def modes(model) -> set[str]:
    return set(encoding_modes.chosen.get(hidden_states_of(transformer_of(model)), {}).values())


def loss_of(model):
    return splade_loss(model, losses.SparseMultipleNegativesRankingLoss)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
def test_steps_are_those_of_stock(encoder, mode, monkeypatch, family, activation):
    model = splade(encoder(family, masked_lm=True), activation_function=activation)
    steps = {"contrastive": (loss_of(model), batch_of(model, 3))}
    assert_as_stock(model, Decoded.of(model, monkeypatch), steps)
    assert modes(model) == {mode}


@pytest.mark.parametrize("family", FAMILIES)
def test_encoded_texts_are_those_of_stock(encoder, monkeypatch, family):
    model = splade(encoder(family, masked_lm=True))
    texts = [*TEXTS[3], ""]
    options = [{}, {"max_active_dims": 5}, {"convert_to_sparse_tensor": False, "batch_size": 2}]
    stock = [model.encode(texts, show_progress_bar=False, **each) for each in options]
    pylate_fastmaxsim.enable()
    model.encode(texts[:1])
    decoded = Decoded.of(model, monkeypatch)
    ours = [model.encode(texts, show_progress_bar=False, **each) for each in options]
    for own, expected in zip(ours, stock, strict=True):
        assert (own.layout, own.dtype, own.shape) == (expected.layout, expected.dtype, expected.shape)
        torch.testing.assert_close(own.to_dense(), expected.to_dense())
    assert not decoded.tokens
    # Texts of similar length need no check of how to leave padding out.
    assert not modes(model)
