"""Encoding documents without padding, on encoders that allow it and on encoders that do not."""

from __future__ import annotations

import gc
import json
import logging
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils.operations import convert_outputs_to_fp32
from encoded import assert_encodes_as_stock, batch_of, calls_of, encode, mode_of, padded_tokens, tokens_of
from models import FAMILIES, attend_to_own_document, collated, features, load_model, sentences
from pylate import losses
from pylate.utils import ColBERTCollator
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.encoding import attention as encoding_attention
from pylate_fastmaxsim.integrations.encoding import encode as encoding_encode
from pylate_fastmaxsim.integrations.encoding import modes
from pylate_fastmaxsim.integrations.encoding.batch import Documents


@pytest.mark.parametrize(
    ("family", "collate"),
    [("modernbert", features), *((each, collated) for each in (*FAMILIES, "distilbert", "qwen3"))],
)
def test_token_embeddings_are_those_of_stock(encoder, mode, family, collate):
    model = load_model(encoder(family)).double()
    pylate_fastmaxsim.enable()
    for seed, count in ((0, 6), (10, 1), (20, 17)):
        assert_encodes_as_stock(model, batch_of(model, seed, count, collate))
    assert mode_of(model) == {mode}
    calls = calls_of(model, lambda: encode(model, batch_of(model, collate=collate)))
    live = int(sum(column["attention_mask"].sum() for column in batch_of(model)[1:]))
    tokens = sum(call["input_ids"].numel() for call in calls)
    assert (len(calls), tokens) == (1, live) if mode == "packed" else live <= tokens < 1.3 * live


def test_attention_written_into_the_model_is_not_packed(encoder, packed, caplog):
    model = load_model(encoder("mpnet")).double()
    pylate_fastmaxsim.enable()
    with caplog.at_level(logging.INFO, "pylate_fastmaxsim"):
        for seed in range(2):
            assert_encodes_as_stock(model, batch_of(model, seed))
    assert mode_of(model) == {"grouped"}
    assert len([record for record in caplog.records if "attn_implementation='eager'" in record.message]) == 1


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
    plan = encoding_encode.plan_documents(wrapped, batch_of(model)[1:], model.skiplist)
    for own, other in zip(
        tokens_of(encoding_encode.encode(wrapped, plan)), padded_tokens(model, batch_of(model)), strict=True
    ):
        torch.testing.assert_close(own, other)
    assert "DataParallel" in caplog.text


def test_deciding_leaves_no_trace(encoder, mode):
    model = load_model(encoder("bert", hidden_dropout_prob=0.1))
    model[0].auto_model.pooler.eval()
    training = {name: module.training for name, module in model.named_modules()}
    random_state = torch.get_rng_state()
    pylate_fastmaxsim.enable()
    modes.mode_for(model, batch_of(model)[1:], None)
    assert mode_of(model) == {mode}
    assert training == {name: module.training for name, module in model.named_modules()}
    assert torch.equal(random_state, torch.get_rng_state())
    assert all(weight.grad is None for weight in model.parameters())


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


def test_dropout_reaches_packed_attention(encoder, monkeypatch):
    dropped = []

    def recording(*args, dropout, **options):
        dropped.append(dropout)
        return attend_to_own_document(*args, dropout=dropout, **options)

    monkeypatch.setattr(encoding_attention, "variable_length_attention", recording)
    model = load_model(encoder("bert", attention_probs_dropout_prob=0.2))
    pylate_fastmaxsim.enable()
    encode(model, batch_of(model))
    assert set(dropped[-2:]) == {0.2}


def test_rotated_queries_and_keys_are_attended_to_in_the_dtype_of_autocast(encoder, monkeypatch):
    """Qwen 3, Llama, Gemma, EuroBERT and others rotate in float32, which FlashAttention does not take."""
    seen = []

    def attend(query, key, value, *args, **kwargs):
        seen.append({query.dtype, key.dtype, value.dtype})
        return attend_to_own_document(query, key, value, *args, **kwargs)

    monkeypatch.setattr(encoding_attention, "variable_length_attention", attend)
    model = load_model(encoder("qwen3"))
    with pylate_fastmaxsim.enabled(), torch.autocast("cpu", torch.bfloat16):
        losses.Contrastive(model)(batch_of(model), None).backward()
        assert mode_of(model) == {"packed"}
    assert seen and all(dtypes == {torch.bfloat16} for dtypes in seen)


def half_only(query, *args, **options):
    if query.dtype != torch.bfloat16:
        raise encoding_attention.PackingUnsupported("half precision only")
    return attend_to_own_document(query, *args, **options)


def test_it_is_decided_anew_when_the_precision_changes(model, monkeypatch):
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


def test_release_puts_everything_back(model, packed):
    gc.collect()  # masks of other tests
    before = dict(ALL_ATTENTION_FUNCTIONS._global_mapping)
    with pylate_fastmaxsim.enabled():
        encode(model, batch_of(model))
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is not before["sdpa"]
    assert dict(ALL_ATTENTION_FUNCTIONS._global_mapping) == before
    assert len(modes.chosen) == 0


def test_release_does_not_wait_for_the_garbage_collector(model, packed):
    gc.collect()  # masks of other tests
    before = dict(ALL_ATTENTION_FUNCTIONS._global_mapping)
    gc.disable()
    try:
        with pylate_fastmaxsim.enabled():
            cycle = [losses.CachedContrastive(model)(batch_of(model))]
            cycle.append(cycle)
            del cycle
        assert dict(ALL_ATTENTION_FUNCTIONS._global_mapping) == before
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


@pytest.mark.compile
def test_a_compiled_loss(encoder, packed):
    model = load_model(encoder("bert")).double()
    loss_function = losses.Contrastive(model)

    def gradients(step, seed):
        model.zero_grad()
        loss = step([dict(column) for column in batch_of(model, seed)])
        loss.backward()
        # Compiled code gives the pooler, which no loss uses, gradients of 0.
        used = {name: weight.grad for name, weight in model.named_parameters() if "pooler" not in name}
        return loss.detach(), used

    expected = [gradients(loss_function, seed) for seed in range(2)]
    torch._dynamo.reset()
    compiled = torch.compile(loss_function, backend="eager")
    pylate_fastmaxsim.enable(stock_masking=True)
    for seed in range(2):
        torch.testing.assert_close(gradients(compiled, seed), expected[seed], atol=1e-9, rtol=1e-9)
    assert mode_of(model) == {"packed"}


def texts_with_keys(model):
    """A batch of texts that are dictionaries, of which the tokenizer leaves the keys."""
    texts = [sentences(6, longest=8), sentences(6, seed=1)]
    rows = [{"query": {"title": query}, "document": {"body": document}} for query, document in zip(*texts, strict=True)]
    batch = ColBERTCollator(tokenize_fn=model.tokenize)(rows)
    return [
        {key.removeprefix(f"{name}_"): value for key, value in batch.items() if key.startswith(name)}
        for name in ("query", "document")
    ]


@pytest.mark.parametrize("loss_class", [losses.Contrastive, partial(losses.CachedContrastive, mini_batch_size=4)])
def test_texts_that_are_dictionaries(encoder, mode, loss_class):
    model = load_model(encoder("bert")).double()
    loss_function = loss_class(model)
    assert isinstance(texts_with_keys(model)[0]["text_keys"], list)
    expected = loss_function(texts_with_keys(model))
    pylate_fastmaxsim.enable(stock_masking=True)
    for _ in range(2):
        torch.testing.assert_close(loss_function(texts_with_keys(model)), expected)
    assert all(decided for joins in modes.joined.values() for decided in joins.values())


def test_a_saved_model_is_an_ordinary_model(model, packed, tmp_path):
    batch = batch_of(model)
    expected = padded_tokens(model, batch)
    with pylate_fastmaxsim.enabled():
        encode(model, batch)
        model.save(str(tmp_path))
    for path in Path(tmp_path).rglob("*.json"):
        assert "fastmaxsim" not in path.read_text()
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "modernbert"
    again = load_model(str(tmp_path)).double()
    for own, other in zip(padded_tokens(again, batch), expected, strict=True):
        torch.testing.assert_close(own, other)


def test_documents_of_columns_of_different_width():
    columns = [
        {"input_ids": torch.tensor([[1, 2, 0], [3, 0, 0]]), "attention_mask": torch.tensor([[1, 1, 0], [1, 0, 0]])},
        {"input_ids": torch.tensor([[4, 5]]), "attention_mask": torch.tensor([[1, 1]])},
        {"input_ids": torch.tensor([[6, 7, 8, 9]]), "attention_mask": torch.tensor([[1, 1, 1, 1]])},
    ]
    joined = Documents.from_columns(columns)
    assert joined.input_ids.reshape(-1)[joined.token_index].tolist() == list(range(1, 10))
    assert joined.cu_seqlens.tolist() == [0, 2, 3, 5, 9] and joined.cu_seqlens.dtype == torch.int32


@pytest.mark.parametrize("skiplist", [[], [3], [2, 5, 6], list(range(40))], ids=str)
def test_which_tokens_are_skipped(skiplist):
    column = {"input_ids": torch.arange(24).view(2, 12).int(), "attention_mask": torch.ones(2, 12, dtype=torch.int64)}
    counts = encoding_encode.counting_tokens(column, skiplist)
    assert counts.tolist() == [[token not in skiplist for token in row] for row in column["input_ids"].tolist()]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_bounded_inner_products_are_not_packed_unless_stock_leaves_them_unbounded(packed, implementation):
    module = nn.Module()
    module.config = SimpleNamespace(_attn_implementation=implementation)
    states = torch.randn(1, 2, 5, 4)
    mask = encoding_attention.packed_mask(torch.tensor([0, 2, 5], dtype=torch.int32), 3)
    attend = partial(encoding_attention._packed_attention, module, states, states, states, mask, is_causal=False)
    assert attend().shape == (1, 5, 2, 4)
    if implementation == "sdpa":
        assert torch.equal(attend(softcap=50.0), attend())
    else:
        with pytest.raises(encoding_attention.PackingUnsupported, match="has no softcap"):
            attend(softcap=50.0)
