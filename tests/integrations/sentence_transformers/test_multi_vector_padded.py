"""What texts of a MultiVectorEncoder are encoded with padding for, and that they are."""

from __future__ import annotations

import copy

import pytest
import torch
from multi_vector import (
    POSITIVES,
    assert_as_stock,
    batch_of,
    load,
    modes,
    of_ones_own,
)
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.modules import Dense, Normalize, Router
from sentence_transformers.multi_vector_encoder import losses
from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling
from torch import nn

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.compilation import layers as compilation_layers


@pytest.fixture
def model(encoder) -> MultiVectorEncoder:
    return load(encoder("bert"))


def test_a_forward_of_ones_own_may_look_at_padding(model, packed, caplog):
    pylate_fastmaxsim.enable()
    of_ones_own(model)(batch_of(model)[1], task="document")
    assert not modes(model)
    assert "OfOnesOwn may read padding" in caplog.text


class Over(nn.Module):
    """A module of somebody's own behind the encoder."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, features: dict) -> dict:
        tokens = features["token_embeddings"]
        return {**features, "token_embeddings": self.layer(tokens.transpose(1, 2)).transpose(1, 2)}


@pytest.mark.parametrize("layer", [nn.Conv1d(32, 32, 3, padding=1), nn.BatchNorm1d(32)])
def test_modules_behind_the_encoder_may_look_at_padding(model, mode, caplog, layer):
    model.insert(1, Over(copy.deepcopy(layer)).double().train())
    assert_as_stock(model, losses.MultiVectorMultipleNegativesRankingLoss(model))
    assert not modes(model)
    assert "with padding, as stock Sentence Transformers does: Over may read padding" in caplog.text


class Unit(nn.Module):
    def forward(self, features: dict) -> dict:
        tokens = features["token_embeddings"]
        return {**features, "token_embeddings": tokens / tokens.norm(dim=-1, keepdim=True)}


@pytest.mark.parametrize("divides", [False, True])
def test_modules_of_ones_own_behind_the_encoder(model, mode, divides):
    if divides:  # by no zero, which would be the norm of padding
        model[[isinstance(module, Normalize) for module in model].index(True)] = Unit()
    else:
        model.insert(1, Over(nn.Tanh()))
    assert_as_stock(model, losses.MultiVectorMultipleNegativesRankingLoss(model), padding_free="always")
    assert modes(model) == {mode}


def test_modules_of_sentence_transformers_behind_the_encoder(encoder, mode):
    routed = [load(encoder(family)) for family in ("bert", "modernbert")]
    for each in routed:
        each.insert(1, Dense(32, 32, module_input_name="token_embeddings").double())
    model = MultiVectorEncoder(modules=[Router.for_query_document(*map(list, routed))], device="cpu").train()
    model.append(HierarchicalTokenPooling(pool_factor=2))
    assert_as_stock(model, losses.MultiVectorMultipleNegativesRankingLoss(model))
    assert [modes(each) for each in routed] == [{mode}, {mode}]


def returns_all_layers(model):
    model[0].auto_model.config.output_hidden_states = True


def hooks(model):
    model[0].auto_model.register_forward_hook(lambda *_: None)


def pads_on_the_left(model):
    model.tokenizer.padding_side = "left"


@pytest.mark.parametrize(
    "change, said",
    [
        (returns_all_layers, "it returns the hidden states of all layers."),
        (hooks, "a hook of your own is on BertModel"),
        (pads_on_the_left, "the tokenizer pads on the left"),
    ],
)
def test_what_needs_padding_has_it(model, packed, caplog, change, said):
    change(model)
    assert_as_stock(model, losses.MultiVectorMultipleNegativesRankingLoss(model))
    assert modes(model) <= {"padded"}
    assert "with padding, as stock Sentence Transformers does: " in caplog.text and said in caplog.text


@pytest.mark.parametrize(("gap", "said"), [(slice(1, 2), "one has a gap in its attention_mask"), (slice(None), "")])
def test_gaps_and_texts_without_a_token(model, packed, caplog, gap, said):
    features = model.preprocess(POSITIVES, task="document")
    features["attention_mask"][:, gap] = 0
    stock = model(dict(features), task="document")
    pylate_fastmaxsim.enable()
    ours = model(dict(features), task="document")
    assert said in caplog.text
    assert torch.equal(ours["attention_mask"], stock["attention_mask"])
    attended = stock["attention_mask"].bool()
    torch.testing.assert_close(ours["token_embeddings"][attended], stock["token_embeddings"][attended])
    assert ours["token_embeddings"].shape == stock["token_embeddings"].shape


def copied(module: nn.Module) -> nn.Module:
    """What DataParallel makes for one step."""
    copy = module._replicate_for_data_parallel()
    for name, weight in module._parameters.items():
        setattr(copy, name, None if weight is None else weight.view_as(weight))
    for name, inner in module._modules.items():
        copy._modules[name] = copied(inner)
    return copy


def test_copies_of_data_parallel(model, packed, caplog):
    features = batch_of(model)[1]
    stock = model(dict(features), task="document")["token_embeddings"]
    pylate_fastmaxsim.enable(compile=True)
    for _ in range(2):
        ours = copied(model)(dict(features), task="document")["token_embeddings"]
    torch.testing.assert_close(ours, stock)
    assert not compilation_layers._compiled and not modes(model)
    assert (
        caplog.text.count("does: DataParallel copies the model") == caplog.text.count("compile=True does nothing") == 1
    )


def test_what_sentence_transformers_flattened_is_left_to_it(model, packed, caplog):
    pylate_fastmaxsim.enable(compile=True)
    flat = {"input_ids": torch.ones(1, 4, dtype=torch.long), "cu_seq_lens_q": torch.tensor([0, 4])}
    model(flat, task="document")
    assert not modes(model) and not compilation_layers._compiled
    assert "compile=True does nothing: Sentence Transformers leaves padding out itself." in caplog.text
    assert caplog.text.count("calls the encoder for each column of a batch") == 1
