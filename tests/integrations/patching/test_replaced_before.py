"""Functions of PyLate that a script replaced by its own: they stay in force, and one line of log says so."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch
from compared import assert_equal, batch_of, run
from models import collated
from paths import SUPPORT
from pylate import losses, rank
from pylate.models import ColBERT, Dense
from pylate.scores import ColBERTScores
from pylate.utils import ColBERTCollator

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.enable import available_patches

available_patches()  # what they run in the place of theirs is PyLate's own, not a test's

LOSSES = [losses.Contrastive, losses.CachedContrastive]
rank_module = sys.modules[rank.rerank.__module__]
scores_module = sys.modules[ColBERTScores.__module__]


def wrap(patch, owner, name, wrapper) -> None:
    """Replace a function by one that ``wrapper`` makes of it."""
    patch.setattr(owner, name, wrapper(getattr(owner, name)))


def times(factor):
    """Makes a function that returns so many times what it returned."""
    return lambda stock: lambda *args, **kwargs: factor * stock(*args, **kwargs)


def weigh(features):
    embeddings = features["token_embeddings"]
    weights = torch.linspace(1, 4, embeddings.shape[-1], dtype=embeddings.dtype)
    return {**features, "token_embeddings": embeddings * weights}


def dense(patch):
    wrap(patch, Dense, "forward", lambda stock: lambda self, features: weigh(stock(self, features)))


def model_forward(patch):
    wrap(patch, ColBERT, "forward", lambda stock: lambda self, *args, **kwargs: weigh(stock(self, *args, **kwargs)))


def score_groups(patch):
    def wrapper(stock):
        return lambda self, queries, *args, **kwargs: stock(self, queries, *args, **kwargs) / queries.shape[1]

    wrap(patch, ColBERTScores, "__call__", wrapper)


def collator(patch):
    def wrapper(stock):
        def shorter(self, rows):
            batch = stock(self, rows)
            for key, value in batch.items():
                if key.startswith("document") and key.endswith("attention_mask"):
                    value[:, 6:] = 0
            return batch

        return shorter

    wrap(patch, ColBERTCollator, "__call__", wrapper)


def loss_forward(patch):
    for loss_class in LOSSES:
        wrap(patch, loss_class, "forward", times(3))


def assert_said_once(caplog, pattern: str) -> None:
    assert len([message for message in caplog.messages if re.search(pattern, message)]) == 1


@pytest.mark.parametrize("loss_class", LOSSES)
@pytest.mark.parametrize(
    "replace, said",
    [
        (dense, "pylate.models.Dense.Dense.forward is not accelerated"),
        (model_forward, "The head is not fused, .*: the forward of ColBERT is not PyLate's own"),
        (score_groups, "ColBERTScores.__call__ is not accelerated"),
        (collator, "ColBERTCollator.__call__ is not accelerated"),
        (loss_forward, r"\.Contrastive.forward is not accelerated"),
    ],
)
def test_losses_with_what_was_replaced_before(model, monkeypatch, caplog, replace, said, loss_class):
    loss_function = loss_class(model)
    plain = run(loss_function, batch_of(model, collate=collated))[0]
    with monkeypatch.context() as patch:
        replace(patch)
        stock = run(loss_function, batch_of(model, collate=collated))
        assert stock[0] != plain
        with pylate_fastmaxsim.enabled(stock_masking=True):
            for _ in range(2):
                assert_equal(run(loss_function, batch_of(model, collate=collated)), stock)
        assert run(loss_function, batch_of(model, collate=collated))[0] == stock[0]
    assert_said_once(caplog, said)
    assert run(loss_function, batch_of(model, collate=collated))[0] == plain


EMBEDDINGS = torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(0))
DOCUMENTS = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(1))


def results():
    reranked = rank_module.rerank([["a", "b"]], [EMBEDDINGS[0]], [list(DOCUMENTS)])
    groups = ColBERTScores()(EMBEDDINGS, DOCUMENTS[:, None])
    return scores_module.colbert_scores(EMBEDDINGS, DOCUMENTS).tolist(), groups.tolist(), reranked


def test_scores_and_the_reranking_through_them(monkeypatch, caplog):
    plain = results()
    wrap(monkeypatch, scores_module, "colbert_scores", times(-1))
    monkeypatch.setattr(rank_module, "colbert_scores", scores_module.colbert_scores)
    stock = results()
    assert all(theirs != own for theirs, own in zip(stock, plain, strict=True))
    with pylate_fastmaxsim.enabled():
        assert results() == stock
    assert_said_once(caplog, "colbert.colbert_scores is not accelerated")
    for name in ("rerank", "ColBERTScores.__call__"):
        assert_said_once(caplog, f"{name} is not accelerated")


def test_reranking(monkeypatch, caplog):
    for module in (rank, rank_module):
        monkeypatch.setattr(module, "rerank", lambda *args, **kwargs: "theirs")
    with pylate_fastmaxsim.enabled():
        assert rank.rerank([["a"]], [EMBEDDINGS[0]], [[DOCUMENTS[0]]]) == "theirs"
        assert results()[2] == "theirs"
    assert rank.rerank([["a"]], [EMBEDDINGS[0]], [[DOCUMENTS[0]]]) == "theirs"
    assert_said_once(caplog, "rank.rerank is not accelerated")


def test_nothing_is_said_where_nothing_was_replaced(model, caplog):
    pylate_fastmaxsim.enable()
    run(losses.Contrastive(model), batch_of(model))
    results()
    assert not [message for message in caplog.messages if "is not accelerated" in message]


@pytest.mark.process
def test_what_was_replaced_at_first_is_not_run_after_it_was_put_back():
    code = """
from pylate.models import Dense
stock = Dense.forward
Dense.forward = lambda self, features: stock(self, features) | {"token_embeddings": None}
import pylate_fastmaxsim
pylate_fastmaxsim.enable()
pylate_fastmaxsim.disable()
Dense.forward = stock
pylate_fastmaxsim.enable()
assert Dense.forward is stock
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.process
def test_a_loss_class_replaced_before_the_import_is_accelerated_as_what_it_derives_from(encoder):
    code = f"""
import logging
from unittest.mock import Mock
from pylate import losses
class Contrastive(losses.Contrastive):
    pass
losses.Contrastive = Contrastive
import pylate_fastmaxsim
from models import features, load_model, sentences
said = Mock()
logging.getLogger("pylate_fastmaxsim").addFilter(lambda record: said(record.getMessage()) or True)
model = load_model({str(encoder("modernbert"))!r})
batch = features(model, *[sentences(3, longest=8, seed=column) for column in range(3)])
pylate_fastmaxsim.enable()
losses.Contrastive(model)(batch).backward()
messages = [call.args[0] for call in said.call_args_list]
assert not any("is not accelerated" in message for message in messages), messages
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=SUPPORT)
