"""What the trial on the first batch finds out about an encoder."""

from __future__ import annotations

import logging

import pytest
import torch
from models import TEXT, attend_to_own_document, collated, features, load_model, sentences
from test_packing import assert_encodes_as_stock, batch_of, calls_of, encode, mode_of
from torch import nn

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations import attention


def test_a_cpu_is_no_reason_to_warn(model, caplog):
    pylate_fastmaxsim.enable()
    with caplog.at_level(logging.INFO, "pylate_fastmaxsim"):
        encode(model, batch_of(model))
    (record,) = [record for record in caplog.records if "not packed" in record.message]
    assert record.levelno == logging.INFO and "needs a CUDA device" in record.message


def _ignore_positions(model):
    forward = model[0].auto_model.forward
    model[0].auto_model.forward = lambda position_ids=None, **kwargs: forward(**kwargs)


def _take_no_positions(model):
    model[0].model_forward_params = model[0].model_forward_params - {"position_ids"}


def _raise_for_four_dimensional_masks(model):
    def check(_module, _args, kwargs):
        if kwargs["attention_mask"].dim() == 4:
            raise ValueError("no such mask\nand a long explanation")

    model[0].auto_model.register_forward_pre_hook(check, with_kwargs=True)


def _attend_to_other_documents(_model):
    def everything(query, key, value, cu_seqlens, max_length, **options):
        whole = torch.tensor([0, len(query)])
        return attend_to_own_document(query, key, value, whole, len(query), **options)

    attention.variable_length_attention = everything  # the fixture puts it back


def _forget_the_window(_model):
    def wide(*args, window, **options):
        return attend_to_own_document(*args, window=(-1, -1), **options)

    attention.variable_length_attention = wide


@pytest.mark.parametrize(
    "family, spoil, said",
    [
        ("bert", _ignore_positions, "BertModel cannot take packed documents (RuntimeError: The size"),
        ("modernbert", _take_no_positions, "takes no position_ids"),
        ("modernbert", _raise_for_four_dimensional_masks, "cannot take packed documents (ValueError: no such mask)."),
        ("modernbert", _attend_to_other_documents, "other token embeddings"),
        ("modernbert", _forget_the_window, "other token embeddings"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_first_batch_shows_an_encoder_that_cannot_be_packed(encoder, packed, caplog, family, spoil, said, dtype):
    model = load_model(encoder(family, max_position_embeddings=128)).to(dtype)
    spoil(model)
    pylate_fastmaxsim.enable()
    with caplog.at_level(logging.INFO, "pylate_fastmaxsim"):
        for seed in range(2):
            assert_encodes_as_stock(model, batch_of(model, seed), 1e-10 if dtype == torch.float64 else 1e-4)
    assert mode_of(model) == {"grouped"}
    (record,) = [record for record in caplog.records if "not packed" in record.message]
    assert said in record.message


def test_long_documents_are_looked_at_before_there_are_any(encoder, packed):
    model = load_model(encoder("modernbert")).double()
    _forget_the_window(model)
    pylate_fastmaxsim.enable()
    assert_encodes_as_stock(model, features(model, ["sea", "sand"], ["a", "the sea"]))
    assert mode_of(model) == {"grouped"}


def test_a_document_length_beyond_the_positions_of_an_encoder(encoder, packed):
    # RoBERTa counts from behind its padding token: 62 of the 64 positions are for tokens.
    model = load_model(encoder("xlm-roberta"), document_length=64).double()
    pylate_fastmaxsim.enable()
    batch = features(model, sentences(4, longest=4), sentences(4, longest=8), sentences(4, longest=40, seed=1))
    for column in batch[1:]:
        assert column["input_ids"].shape[1] == 64
        # PyLate pads with the mask token, which has a position.
        column["input_ids"][column["attention_mask"] == 0] = model[0].auto_model.config.pad_token_id
    assert_encodes_as_stock(model, batch)
    assert mode_of(model) == {"packed"}


@pytest.mark.parametrize("gap", [slice(1, 2), slice(0, 3)], ids=["inside", "in front"])
@pytest.mark.parametrize("collate", [collated, features])
def test_documents_with_gaps_are_not_packed(model, packed, monkeypatch, gap, collate):
    pylate_fastmaxsim.enable()
    assert_encodes_as_stock(model, batch_of(model, collate=collate))
    assert mode_of(model) == {"packed"}
    tokenize = type(model).tokenize

    def with_a_gap(self, *args, **kwargs):
        tokens = tokenize(self, *args, **kwargs)
        longest = tokens["attention_mask"].sum(dim=1).argmax()
        tokens["attention_mask"][longest, gap] = 0
        return tokens

    monkeypatch.setattr(type(model), "tokenize", with_a_gap)
    batch = batch_of(model, collate=collate)
    assert_encodes_as_stock(model, batch)
    assert all(call["attention_mask"].dim() == 2 for call in calls_of(model, lambda: encode(model, batch)))


class _LengthAware(nn.Module):
    """An encoder that looks at the padded length."""

    def __init__(self, dense):
        super().__init__()
        self.dense = dense

    def forward(self, features):
        features = self.dense(features)
        features["token_embeddings"] = features["token_embeddings"].roll(features["input_ids"].shape[1] % 3, dims=-1)
        return features


def test_an_encoder_that_looks_at_the_padded_length_keeps_its_padding(model, packed, caplog):
    model[1] = _LengthAware(model[1])
    pylate_fastmaxsim.enable()
    assert_encodes_as_stock(model, batch_of(model))
    assert mode_of(model) == {"padded"}
    assert "with padding, as stock PyLate does" in caplog.text


def texts_of(words: int, count: int = 4) -> list[str]:
    return [" ".join(TEXT.split()[begin : begin + words]) for begin in range(count)]


@pytest.mark.parametrize("family", ["convbert", "fnet"])
def test_what_an_encoder_makes_of_padding_is_looked_at_before_there_is_any(encoder, mode, family):
    model = load_model(encoder(family)).double()
    pylate_fastmaxsim.enable()
    full = features(model, texts_of(2), texts_of(60))
    assert full[1]["attention_mask"].all()
    for batch in (full, batch_of(model)):
        assert_encodes_as_stock(model, batch)
    assert mode_of(model) == {"padded"}


@pytest.mark.parametrize("family", ["longrope", "dynamic rope"])
def test_rotary_positions_that_the_longest_text_of_a_call_scales(encoder, mode, family):
    pylate_fastmaxsim.enable()
    for length, modes in ((32, {"padded"}), (16, {mode})):
        model = load_model(encoder(family), document_length=length).double()
        for words in (13, 2):
            assert_encodes_as_stock(model, features(model, texts_of(2), texts_of(words)))
        assert mode_of(model) == modes
