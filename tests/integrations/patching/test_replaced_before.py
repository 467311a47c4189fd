"""Functions of PyLate that a script replaced by its own: they stay in force, and one line of log says so."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch
from pylate import losses, rank
from pylate.models import ColBERT, Dense
from pylate.scores import ColBERTScores
from pylate.utils import ColBERTCollator

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.hosts import find_replacements
from tests.support.compared import assert_equal, batch_of, run
from tests.support.models import collated

find_replacements()  # what they run in the place of theirs is PyLate's own, not a test's

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
        (model_forward, "The head is not fused, .*: ColBERT may change"),
        (score_groups, "ColBERTScores.__call__ is not accelerated"),
        (collator, "ColBERTCollator.__call__ is not accelerated"),
        (loss_forward, r"\.Contrastive.forward is not accelerated"),
    ],
)
def test_losses_with_what_was_replaced_before(model, monkeypatch, caplog, replace, said, loss_class):
    def step():
        return run(loss_class(model), batch_of(model, collate=collated))

    plain = step()
    with monkeypatch.context() as patch:
        replace(patch)
        stock = step()
        assert stock[0] != plain[0]
        with pylate_fastmaxsim.enabled(stock_masking=True):
            for _ in range(2):
                assert_equal(step(), stock)
        assert step()[0] == stock[0]
    assert_said_once(caplog, said)
    assert step()[0] == plain[0]


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
    for name in ("colbert.colbert_scores", "rerank", "ColBERTScores.__call__"):
        assert_said_once(caplog, f"{name} is not accelerated")
    for module in (rank, rank_module):
        monkeypatch.setattr(module, "rerank", lambda *args, **kwargs: "theirs")
    with pylate_fastmaxsim.enabled():
        assert results()[2] == rank.rerank() == "theirs"
    assert results()[2] == rank.rerank() == "theirs"


@pytest.mark.process
def test_what_was_replaced_before_the_import(encoder):
    """A loss class is accelerated as what it derives from, and a method that was put back is not run any more."""
    code = f"""
from pylate import losses
from pylate.models import Dense
class Contrastive(losses.Contrastive):
    pass
losses.Contrastive = Contrastive
stock = Dense.forward
Dense.forward = lambda self, features: stock(self, features) | {{"token_embeddings": None}}
import pylate_fastmaxsim
pylate_fastmaxsim.enable()
pylate_fastmaxsim.disable()
Dense.forward = stock
pylate_fastmaxsim.enable()
assert Dense.forward is stock
from tests.support.compared import batch_of
from tests.support.models import load_model
model = load_model({str(encoder("modernbert"))!r})
losses.Contrastive(model)(batch_of(model)).backward()
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "Contrastive is not accelerated" not in done.stderr and "Contrastive.forward" not in done.stderr
