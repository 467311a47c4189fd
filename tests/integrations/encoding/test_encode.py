"""Encoding documents without padding, on encoders that allow it and on encoders that do not."""

import gc
from itertools import combinations_with_replacement

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pylate import losses
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.encoding import attention as encoding_attention
from pylate_fastmaxsim.integrations.encoding import modes
from pylate_fastmaxsim.integrations.encoding.plans import group_by_length
from tests.support.compared import run
from tests.support.encoded import assert_encodes_as_stock, batch_of, calls_of, encode, mode_of
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
        assert_encodes_as_stock(model, batch_of(model, queries=count, seed=seed, collate=collate))
    assert mode_of(model) == {mode}
    calls = calls_of(model, lambda: encode(model, batch_of(model, collate=collate)))
    live = int(sum(column["attention_mask"].sum() for column in batch_of(model)[1:]))
    tokens = sum(call["input_ids"].numel() for call in calls)
    assert (len(calls), tokens) == (1, live) if mode == "packed" else live <= tokens < 1.3 * live


@pytest.mark.parametrize(("gap", "collate"), [(slice(1, 2), collated), (slice(0, 3), features)])
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


@pytest.fixture
def restored():
    gc.collect()  # masks of other tests
    before = dict(ALL_ATTENTION_FUNCTIONS.items())
    return lambda: dict(ALL_ATTENTION_FUNCTIONS.items()) == before


def test_release_puts_everything_back_without_waiting_for_the_garbage_collector(model, packed, restored):
    gc.disable()
    try:
        with pylate_fastmaxsim.enabled():
            cycle = [losses.CachedContrastive(model)(batch_of(model))]
            assert not restored()
            cycle.append(cycle)
            del cycle
        assert restored()
        assert len(modes.chosen) == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("loss_class", [losses.CachedContrastive, losses.Contrastive])
def test_a_backward_after_release_still_attends_inside_documents(model, packed, restored, loss_class):
    if loss_class is losses.Contrastive:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    batch, loss_function = batch_of(model), loss_class(model)
    _, expected = run(loss_function, batch)
    nn.Module.zero_grad(model)
    with pylate_fastmaxsim.enabled(stock_masking=True):
        loss = loss_function([dict(column) for column in batch])
    assert not restored()
    loss.backward()
    torch.testing.assert_close({name: weight.grad for name, weight in model.named_parameters()}, expected)
    del loss
    gc.collect()
    assert restored()


def tokens_of(groups, lengths):
    return sum(len(group) * max(lengths[index] for index in group) for group in groups if group)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=40), st.integers(1, 3))
def test_groups_hold_every_document_once_with_the_least_padding(lengths, count):
    count = min(count, len(lengths))
    groups = group_by_length(lengths, count)
    assert len(groups) == count and all(groups)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    for cuts in combinations_with_replacement(range(len(order)), count - 1):
        borders = [0, *cuts, len(order)]
        others = [order[begin:end] for begin, end in zip(borders, borders[1:], strict=False)]
        assert tokens_of(groups, lengths) <= tokens_of(others, lengths)
