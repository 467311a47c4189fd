"""Queries and documents of a MultiVectorEncoder's loss in one call of the encoder."""

from __future__ import annotations

import pytest
import torch
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.multi_vector_encoder import losses

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.encoding.attention import is_packed_mask
from pylate_fastmaxsim.integrations.sentence_transformers import encoder as sentence_transformers_encoder
from pylate_fastmaxsim.integrations.sentence_transformers import padding_free
from tests.support.multi_vector import (
    COUNT,
    TEACHER,
    assert_as_stock,
    assert_equal,
    batch_of,
    found,
    load,
    of_ones_own,
    run,
)

CONTRASTIVE = losses.MultiVectorMultipleNegativesRankingLoss


@pytest.fixture
def model(encoder):
    return load(encoder("bert"))


@pytest.fixture
def texts(monkeypatch) -> list[int]:
    """How many texts each call of the encoder has, those that only try out what could be done left out."""
    made, stock, decide = [], sentence_transformers_encoder._stock_transformer, sentence_transformers_encoder.mode_for

    def transformer(self, features, **kwargs):
        mask = features["attention_mask"]
        made.append(mask.shape[-1] - 1 if is_packed_mask(mask) else len(mask))
        return stock(self, features, **kwargs)

    def mode_for(*args, **kwargs):
        before = len(made)
        try:
            return decide(*args, **kwargs)
        finally:
            del made[before:]

    monkeypatch.setattr(sentence_transformers_encoder, "_stock_transformer", transformer)
    monkeypatch.setattr(sentence_transformers_encoder, "mode_for", mode_for)
    return made


def test_one_call_encodes_all_with_gradients_in_chunks_of_documents(model, packed, texts):
    """Chunks are cut to their longest document each."""
    for size in (None, 1, 7, 2 * COUNT):
        loss = CONTRASTIVE(model, mini_batch_size=size)
        pylate_fastmaxsim.disable()
        stock = run(model, loss)
        pylate_fastmaxsim.enable()
        for _ in range(2):
            texts.clear()
            assert_equal(run(model, loss), stock)
            assert texts == [3 * COUNT]


def test_columns_that_are_not_merged(model, packed, texts, monkeypatch):
    """Column after column, in whatever calls they are asked for."""
    loss = CONTRASTIVE(model)
    stock = run(model, loss)
    pylate_fastmaxsim.enable()
    # Behind enable(), which leaves a loss to stock if a function that it calls was replaced before.
    monkeypatch.setattr(
        "sentence_transformers.base.losses.merged_forward.merge_feature_batches", lambda features_list: None
    )
    assert_equal(run(model, loss), stock)
    assert texts == [3 * COUNT]


def other_documents(_, args):
    features = args[0]
    # Not the queries: what these lead to is all that could tell of a hook.
    if features.get("task") == "document":
        features["input_ids"] = features["input_ids"].flip(0)
        features["attention_mask"] = features["attention_mask"].flip(0)


def hooked(model):
    model[0].register_forward_pre_hook(other_documents)


def hooked_around(model):
    model.register_forward_pre_hook(other_documents)


def replaced(model):
    forward = model[0].forward
    model[0].forward = lambda features, **kwargs: forward(
        {key: values.flip(0) if isinstance(values, torch.Tensor) else values for key, values in features.items()}
    )


class Calls(MultiVectorEncoder):
    def __call__(self, features, task=None, **kwargs):
        if task == "document":
            features = {**features, "input_ids": features["input_ids"].flip(0)}
        return super().__call__(features, task=task, **kwargs)


class Forwards(Transformer):
    def forward(self, features, **kwargs):
        if features.get("task") == "document":
            features["input_ids"] = features["input_ids"].flip(0)
        return super().forward(features, **kwargs)


# Where the forward of the encoder was replaced, that calls what stood there before.
@pytest.mark.parametrize(
    "change, calls",
    [
        (hooked, 2),
        (hooked_around, 2),
        (of_ones_own, 2),
        (replaced, 0),
        (lambda model: setattr(model, "__class__", Calls), 2),
        (lambda model: setattr(model[0], "__class__", Forwards), 2),
    ],
)
def test_what_may_change_documents_before_their_call_has_one(model, packed, texts, caplog, change, calls):
    change(model)
    assert_as_stock(model, CONTRASTIVE(model), padding_free="always")
    assert len(texts) == calls
    assert ("in a call of their own: " in caplog.text) == bool(calls)


def with_gaps(columns):
    columns[2]["attention_mask"][0, 1] = 0


def without_documents(columns):
    for column in columns[1:]:
        column["attention_mask"] = torch.zeros_like(column["attention_mask"])


def with_an_input_of_their_own(columns):
    for column in columns[1:]:
        column["position_ids"] = torch.arange(column["input_ids"].shape[1]).expand_as(column["input_ids"])


@pytest.mark.parametrize("change, calls", [(with_gaps, 2), (without_documents, 1), (with_an_input_of_their_own, 2)])
def test_documents_that_need_a_call_of_their_own(model, packed, texts, change, calls):
    columns = batch_of(model)
    change(columns)
    loss = losses.MultiVectorDistillKLDivLoss(model)

    def gradients():
        model.zero_grad(set_to_none=True)
        value = loss([dict(column) for column in columns], TEACHER.clone())
        value.backward()
        return found(model, value)

    stock = gradients()
    pylate_fastmaxsim.enable()
    texts.clear()
    torch.testing.assert_close(gradients(), stock, rtol=1e-5, atol=1e-6)
    assert len(texts) == calls


def many_tokens(model, patch):
    patch.setattr(padding_free, "MOST_TOKENS_BESIDE_QUERIES", 10)


def expanded(model, patch):
    model[0].query_expansion = {"strategy": "fixed", "attend": False, "length": 10}


@pytest.mark.parametrize("change", [many_tokens, expanded])
def test_queries_that_are_encoded_apart(model, packed, texts, monkeypatch, change):
    change(model, monkeypatch)
    assert_as_stock(model, CONTRASTIVE(model))
    assert texts == [COUNT, 2 * COUNT]


def test_what_is_asked_for_in_another_way_is_encoded(model, packed):
    """A score of somebody's own may encode other texts, while the loss encodes its own."""
    loss = CONTRASTIVE(model)
    columns = batch_of(model)
    pylate_fastmaxsim.enable()
    seen = []

    def similarity(queries, documents, **masks):
        # From within the forward, another batch of the same model.
        seen.append(model(batch_of(model)[2], task="document")["token_embeddings"])
        return loss_similarity(queries, documents, **masks)

    loss_similarity, loss.similarity_fct = loss.similarity_fct, similarity
    loss(columns).backward()
    expected = model(batch_of(model)[2], task="document")
    attended = expected["attention_mask"].bool()
    torch.testing.assert_close(seen[0][attended], expected["token_embeddings"][attended])
