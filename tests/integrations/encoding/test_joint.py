"""Queries encoded with packed documents, in one call: every encoder and every kind of query gets what stock gives."""

import logging
from functools import partial

import pytest
import torch
from pylate import losses

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.encoding import encode as encoding_encode
from pylate_fastmaxsim.integrations.encoding import modes
from tests.support.compared import assert_equal, batch_for, run
from tests.support.encoded import batch_of, calls_of, mode_of
from tests.support.models import collated, features, load_model

WIDE = {"local_attention": 24}  # of ModernBERT: local layers see 12 tokens to each side, all of a query of 12


def load(encoder, family: str = "modernbert", **options):
    return load_model(encoder(family, **(WIDE if family == "modernbert" else {})), **options).double()


def step(model, batch, labels=None, loss_class=losses.Contrastive):
    return run(loss_class(model), batch, labels)


def assert_as_stock(model, batch, *args, joint: bool = True):
    with pylate_fastmaxsim.enabled(padding_free=False, stock_masking=True):
        expected = step(model, batch, *args)
    pylate_fastmaxsim.enable(stock_masking=True)
    assert_equal(step(model, batch, *args), expected)
    assert set(modes.joined[model].values()) == {joint}
    assert len(calls_of(model, partial(step, model, batch, *args))) == (1 if joint else 2)


@pytest.mark.parametrize(
    ("family", "queries", "collate"),
    [
        ("modernbert", {}, features),
        ("modernbert", {"attend_to_expansion_tokens": True}, collated),
        ("modernbert", {"do_query_expansion": False}, collated),
        ("bert", {}, collated),
    ],
)
def test_losses_and_gradients_are_those_of_stock_in_one_call(encoder, packed, family, queries, collate):
    model = load(encoder, family, **queries)
    pylate_fastmaxsim.enable()
    for seed, count in ((0, 6), (10, 1)):
        assert_as_stock(model, batch_of(model, queries=count, seed=seed, collate=collate))
    assert_as_stock(model, *batch_for(losses.Distillation, model), losses.Distillation)


def test_beside_many_documents_queries_have_a_call_of_their_own(encoder, packed, caplog, monkeypatch):
    model = load(encoder)
    many, few = batch_of(model, queries=9), batch_of(model, queries=2)
    tokens = sum(int(column["attention_mask"].sum()) for column in many[1:])
    caplog.set_level(logging.INFO, "pylate_fastmaxsim")
    for most, together in ((tokens - 1, False), (tokens, True)):
        encoding_encode.release()
        monkeypatch.setattr(modes, "MOST_TOKENS_BESIDE_QUERIES", most)
        assert_as_stock(model, many, joint=together)
        # The first batch decides for all.
        assert len(calls_of(model, partial(step, model, few))) == (1 if together else 2)
        assert "call of their own" not in caplog.text


@pytest.mark.parametrize("family", ["modernbert", "qwen3"], ids=["narrow window", "causal"])
def test_queries_that_not_all_of_themselves_see_have_a_call_of_their_own(encoder, packed, caplog, family):
    model = load_model(encoder(family)).double()
    assert_as_stock(model, batch_of(model), joint=False)
    assert mode_of(model) == {"packed"}
    (said,) = [record for record in caplog.records if "in a call of their own" in record.message]
    assert said.levelno == logging.WARNING and "have to attend to the whole query" in said.message


@pytest.mark.parametrize("gap, said", [(True, "has a gap in its attention_mask"), (False, "they have 12 tokens")])
def test_queries_with_a_gap_or_wider_than_said_have_a_call_of_their_own(encoder, packed, caplog, gap, said):
    model = load(encoder)
    assert_as_stock(model, batch_of(model))
    batch = batch_of(model, collate=features) if gap else batch_of(model)
    if gap:
        batch[0]["attention_mask"][0, 1] = 0
    else:
        model.query_length = 5
    assert len(calls_of(model, partial(step, model, batch))) == 2
    encoding_encode.release()
    assert_as_stock(model, batch, joint=False)
    assert said in caplog.text


@pytest.mark.compile
def test_a_loss_that_its_user_compiled(encoder, packed, caplog):
    model = load(encoder, "bert")
    batch = batch_of(model)
    expected = step(model, batch)
    torch._dynamo.reset()
    pylate_fastmaxsim.enable(stock_masking=True)
    loss = torch.compile(losses.Contrastive(model), backend="eager")
    assert_equal(run(loss, batch), expected)
    assert set(modes.joined[model].values()) == {True}
    assert "The head is not fused" in caplog.text and "torch.compile compiles the loss" in caplog.text
