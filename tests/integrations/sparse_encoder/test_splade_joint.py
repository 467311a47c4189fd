"""All columns of a SparseEncoder's loss in one call."""

from __future__ import annotations

import pytest
import torch
from sentence_transformers import SparseEncoder
from sentence_transformers.sparse_encoder import losses
from torch.nn.parallel import DistributedDataParallel

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.sentence_transformers import padding_free
from pylate_fastmaxsim.integrations.sparse_encoder import encoder as sparse_encoder
from tests.support.sparse_encoders import splade
from tests.support.splade_steps import COUNT, assert_equal, batch_of, run, splade_loss

CONTRASTIVE = losses.SparseMultipleNegativesRankingLoss
# Of the queries; the columns of documents are wider.
WIDTH = 9
# Releases from 6 on merge the columns of documents themselves.
try:
    import sentence_transformers.base.losses.merged_forward  # noqa: F401

    APART = [COUNT, 2 * COUNT]
except ImportError:
    APART = [COUNT, COUNT, COUNT]


@pytest.fixture
def model(encoder):
    return splade(encoder("bert", masked_lm=True))


@pytest.fixture
def texts(monkeypatch) -> list[int]:
    """How many texts each call of the operator has."""
    made, operator = [], sparse_encoder.splade_pool

    def splade_pool(hidden, *args, **kwargs):
        made.append(len(hidden))
        return operator(hidden, *args, **kwargs)

    monkeypatch.setattr(sparse_encoder, "splade_pool", splade_pool)
    return made


def assert_calls(model, texts, expected, columns=3, change=lambda batch: None, **options):
    """Two steps are those of stock, and the second makes calls for so many texts."""
    loss, batch = splade_loss(model, CONTRASTIVE, **options), batch_of(model, columns)
    change(batch)
    stock = run(model, loss, batch)
    pylate_fastmaxsim.enable()
    for _ in range(2):
        texts.clear()
        assert_equal(run(model, loss, batch), stock)
    assert texts == expected


@pytest.mark.parametrize("columns", [2, 4])
def test_one_call_embeds_all(model, packed, texts, columns):
    assert_calls(model, texts, [columns * COUNT], columns)


def test_one_call_embeds_all_in_evaluation(model, packed, texts):
    loss, batch = splade_loss(model, CONTRASTIVE), batch_of(model, 3)
    model.eval()
    pylate_fastmaxsim.enable()
    with torch.no_grad():
        ours = loss([dict(column) for column in batch])
        pylate_fastmaxsim.disable()
        stock = loss([dict(column) for column in batch])
    assert texts == [3 * COUNT]
    torch.testing.assert_close(ours, stock)


def test_groups_are_apart(model, texts):
    assert_calls(model, texts, APART)


def many_tokens(model, patch):
    patch.setattr(padding_free, "MOST_TOKENS_BESIDE_QUERIES", 10)


class Calls(SparseEncoder):
    def __call__(self, features, **kwargs):
        ids = features["input_ids"]
        # Not the queries, whose call could tell.
        return super().__call__({**features, "input_ids": ids.flip(0)} if ids.shape[1] > WIDTH else features, **kwargs)


def of_ones_own(model, patch):
    model.__class__ = Calls


@pytest.mark.parametrize("change", [many_tokens, of_ones_own])
def test_columns_in_calls_of_their_own(model, packed, texts, monkeypatch, change):
    change(model, monkeypatch)
    assert_calls(model, texts, APART)


class Around(torch.nn.Module):
    """A wrapper, which may treat documents otherwise than queries. What these lead to is all that could tell of it."""

    def __init__(self, model, queries):
        torch.nn.Module.__init__(self)
        self.module = model
        self.is_query = lambda features: features["input_ids"] is queries["input_ids"]


class Flips(Around):
    def forward(self, features):
        if not self.is_query(features):
            features = {key: values.flip(0) for key, values in features.items() if isinstance(values, torch.Tensor)}
        return self.module(features)


def test_what_is_around_the_model_sees_each_column(model, packed, texts, caplog):
    loss, batch = splade_loss(model, CONTRASTIVE), batch_of(model, 3)
    loss.model = Flips(model, batch[0])
    stock = run(model, loss, batch)
    pylate_fastmaxsim.enable()
    assert_equal(run(model, loss, batch), stock)
    assert texts == APART
    assert "in a call of their own: Flips is around the model" in caplog.text


def test_documents_with_a_gap(model, packed, texts):
    def change(batch):
        batch[2]["attention_mask"][0, 1] = 0

    assert_calls(model, texts, APART, change=change)


class Freezes(Around, DistributedDataParallel):
    """As DistributedDataParallel may be used: documents have no gradients."""

    def forward(self, features):
        with torch.set_grad_enabled(self.is_query(features)):
            return self.module(features)


def test_documents_without_gradients(model, packed, texts):
    loss, batch = splade_loss(model, CONTRASTIVE), batch_of(model, 2)
    loss.model = Freezes(model, batch[0])
    stock = run(model, loss, batch)
    pylate_fastmaxsim.enable()
    assert_equal(run(model, loss, batch), stock)
    assert texts == [2 * COUNT, COUNT]
