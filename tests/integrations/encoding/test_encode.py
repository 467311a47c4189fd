"""Encoding documents without padding, on encoders that allow it and on encoders that do not."""

from __future__ import annotations

import gc
import logging
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils.operations import convert_outputs_to_fp32
from pylate import losses
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.encoding import attention as encoding_attention
from pylate_fastmaxsim.integrations.encoding import modes
from tests.support.encoded import assert_encodes_as_stock, batch_of, calls_of, encode, mode_of, padded_tokens, tokens_of
from tests.support.models import attend_to_own_document, collated, features, load_model


@pytest.mark.parametrize(
    ("family", "collate"),
    [("modernbert", features)]
    # GPT-2 embeds token types as words, and MPNet attends in code of its own.
    + [(family, collated) for family in ("modernbert", "bert", "xlm-roberta", "distilbert", "qwen3", "gpt2", "mpnet")],
)
def test_token_embeddings_are_those_of_stock(encoder, mode, family, collate):
    model = load_model(encoder(family)).double()
    mode = "grouped" if family == "mpnet" else mode
    pylate_fastmaxsim.enable()
    for seed, count in ((0, 6), (10, 1), (20, 17)):
        assert_encodes_as_stock(model, batch_of(model, seed, count, collate))
    assert mode_of(model) == {mode}
    calls = calls_of(model, lambda: encode(model, batch_of(model, collate=collate)))
    live = int(sum(column["attention_mask"].sum() for column in batch_of(model)[1:]))
    tokens = sum(call["input_ids"].numel() for call in calls)
    assert (len(calls), tokens) == (1, live) if mode == "packed" else live <= tokens < 1.3 * live


def test_other_inputs_of_the_encoder_keep_the_padding(model, packed, caplog):
    batch = batch_of(model)
    for column in batch[1:]:
        column["position_ids"] = torch.arange(32).expand_as(column["input_ids"])
    pylate_fastmaxsim.enable()
    assert len(calls_of(model, lambda: encode(model, batch))) == 2
    assert "the encoder is given position_ids" in caplog.text


def test_left_padding_stays(model, packed, caplog):
    model.tokenizer.padding_side = "left"
    pylate_fastmaxsim.enable()
    assert_encodes_as_stock(model, batch_of(model))
    assert "pads on the left" in caplog.text


def test_data_parallel_keeps_the_padding(model, packed, caplog):
    pylate_fastmaxsim.enable()
    wrapped = nn.DataParallel(model)
    encoded = tokens_of(encode(wrapped, batch_of(model)))
    torch.testing.assert_close(encoded, padded_tokens(model, batch_of(model)))
    assert "DataParallel" in caplog.text


def test_attention_that_cannot_drop_is_not_packed_in_training(encoder, monkeypatch):
    def undropped(*args, dropout, **options):
        if dropout > 0:
            raise encoding_attention.PackingUnsupported("no dropout here")
        return attend_to_own_document(*args, dropout=dropout, **options)

    monkeypatch.setattr(encoding_attention, "variable_length_attention", undropped)
    model = load_model(encoder("bert", attention_probs_dropout_prob=0.2))
    pylate_fastmaxsim.enable()
    modes.mode_for(model, batch_of(model)[1:], None)
    assert mode_of(model) == {"grouped"}
    model.eval()
    assert modes.mode_for(model, batch_of(model)[1:], None) == "packed"


@pytest.mark.parametrize(
    ("family", "changes"), [("qwen3", {"attention_dropout": 0.2}), ("bert", {"attention_probs_dropout_prob": 0.2})]
)
def test_packed_attention_drops_and_attends_in_the_dtype_of_autocast(encoder, monkeypatch, family, changes):
    """Qwen 3, Llama, Gemma, EuroBERT and others rotate in float32, which FlashAttention does not take."""
    seen = []

    def recording(query, key, value, *args, dropout, **options):
        seen.append((query.dtype, key.dtype, value.dtype, query.shape[1:], dropout))
        return attend_to_own_document(query, key, value, *args, dropout=dropout, **options)

    monkeypatch.setattr(encoding_attention, "variable_length_attention", recording)
    model = load_model(encoder(family, **changes))
    with pylate_fastmaxsim.enabled(), torch.autocast("cpu", torch.bfloat16):
        losses.Contrastive(model)(batch_of(model), None).backward()
        assert mode_of(model) == {"packed"}
    assert {dtype for call in seen for dtype in call[:3]} == {torch.bfloat16}
    # Two heads of 16.
    assert seen[-1][3:] == ((2, 16), 0.2)


def test_it_is_decided_anew_when_the_precision_changes(model, monkeypatch):
    def half_only(query, *args, **options):
        if query.dtype != torch.bfloat16:
            raise encoding_attention.PackingUnsupported("half precision only")
        return attend_to_own_document(query, *args, **options)

    monkeypatch.setattr(encoding_attention, "variable_length_attention", half_only)
    model.float()
    pylate_fastmaxsim.enable()
    columns = batch_of(model)[1:]
    assert modes.mode_for(model, columns, None) == "grouped"
    with torch.autocast("cpu", torch.bfloat16):
        assert modes.mode_for(model, columns, None) == "packed"

    # What accelerate does.
    model.forward = convert_outputs_to_fp32(torch.autocast("cpu", torch.bfloat16)(model.forward))
    assert modes.mode_for(model, columns, None) == "packed"


def test_it_is_decided_anew_when_the_attention_changes(encoder, packed):
    model = load_model(encoder("bert")).double()
    pylate_fastmaxsim.enable()
    assert_encodes_as_stock(model, batch_of(model))
    assert mode_of(model) == {"packed"}
    model[0].auto_model.set_attn_implementation("eager")
    assert_encodes_as_stock(model, batch_of(model))
    assert mode_of(model) == {"packed", "grouped"}


def test_release_puts_everything_back_without_waiting_for_the_garbage_collector(model, packed):
    gc.collect()  # masks of other tests
    before = dict(ALL_ATTENTION_FUNCTIONS._global_mapping)
    gc.disable()
    try:
        with pylate_fastmaxsim.enabled():
            cycle = [losses.CachedContrastive(model)(batch_of(model))]
            assert ALL_ATTENTION_FUNCTIONS["sdpa"] is not before["sdpa"]
            cycle.append(cycle)
            del cycle
        assert dict(ALL_ATTENTION_FUNCTIONS._global_mapping) == before
        assert len(modes.chosen) == 0
    finally:
        gc.enable()


def test_an_attention_of_somebodys_own_is_not_packed(encoder, packed, caplog):
    """What it adds may begin at zero, as the slopes of this one, and be trained."""

    def sloping(module, query, key, value, attention_mask, *args, **kwargs):
        tokens = torch.arange(query.shape[2], dtype=query.dtype)
        slopes = module.slope[:, None, None] * (tokens[:, None] - tokens).abs()
        mask = slopes.masked_fill(~attention_mask, -torch.inf) if attention_mask is not None else slopes[None]
        return of_transformers(module, query, key, value, mask, *args, **kwargs)

    of_transformers = ALL_ATTENTION_FUNCTIONS["sdpa"]
    AttentionInterface.register("sloping", sloping)
    AttentionMaskInterface.register("sloping", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    try:
        model = load_model(encoder("bert")).double()
        for layer in model[0].auto_model.encoder.layer:
            layer.attention.self.slope = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        model[0].auto_model.set_attn_implementation("sloping")
        caplog.set_level(logging.INFO, "pylate_fastmaxsim")
        pylate_fastmaxsim.enable()
        losses.Contrastive(model)(batch_of(model)).backward()
        assert all(layer.attention.self.slope.grad.any() for layer in model[0].auto_model.encoder.layer)
        assert mode_of(model) == {"grouped"}
        assert "attn_implementation='sloping' is not a function of transformers" in caplog.text
    finally:
        del AttentionInterface._global_mapping["sloping"], AttentionMaskInterface._global_mapping["sloping"]


@pytest.mark.parametrize(
    "loss_class, checkpointing",
    [(losses.CachedContrastive, False), (losses.Contrastive, True)],
    ids=["cached", "checked"],
)
def test_a_backward_after_release_still_attends_inside_documents(model, packed, loss_class, checkpointing):
    gc.collect()  # masks of other tests
    before = dict(ALL_ATTENTION_FUNCTIONS._global_mapping)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    batch, loss_function = batch_of(model), loss_class(model)
    weight = model[0].auto_model.layers[0].attn.Wqkv.weight
    loss_function([dict(column) for column in batch]).backward()
    expected, weight.grad = weight.grad, None
    with pylate_fastmaxsim.enabled(stock_masking=True):
        loss = loss_function([dict(column) for column in batch])
    assert dict(ALL_ATTENTION_FUNCTIONS._global_mapping) != before
    loss.backward()
    torch.testing.assert_close(weight.grad, expected)
    del loss
    gc.collect()
    assert dict(ALL_ATTENTION_FUNCTIONS._global_mapping) == before


def test_bounded_inner_products_are_not_packed_unless_stock_leaves_them_unbounded(packed):
    module = nn.Module()
    module.config = SimpleNamespace(_attn_implementation="sdpa")
    states = torch.randn(1, 2, 5, 4)
    mask = encoding_attention.packed_mask(torch.tensor([0, 2, 5], dtype=torch.int32), 3)
    attend = partial(encoding_attention._packed_attention, module, states, states, states, mask, is_causal=False)
    assert torch.equal(attend(softcap=50.0), attend())
    module.config._attn_implementation = "eager"
    assert attend().shape == (1, 5, 2, 4)
    with pytest.raises(encoding_attention.PackingUnsupported, match="has no softcap"):
        attend(softcap=50.0)
