"""ContrastiveDistillation of a ColBERT: PyLate's two losses together, in one pass, with and without the flag."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from pylate import losses
from torch import nn

import pylate_fastmaxsim
from pylate_fastmaxsim.losses import ContrastiveDistillation
from tests.support.compared import assert_equal, batch_of, run
from tests.support.encoded import calls_of
from tests.support.models import features, load_model, sentences

LABELS = torch.rand(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
OPTIONS = {"contrastive_weight": 0.7, "distillation_weight": 3.0, "temperature": 0.5, "teacher_temperature": 0.25}
SIZES = [{}, {"mini_batch_size": 2}, {"mini_batch_tokens": 70}]


class OfPyLate(nn.Module):
    """Both losses of PyLate, each of which encodes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, sentence_features, labels):
        model, (queries, *documents) = self.model, [dict(column) for column in sentence_features]
        contrastive = losses.Contrastive(model, temperature=0.5)([queries, *documents])
        # Its documents are one column.
        joined = {key: torch.stack([column[key] for column in documents], dim=1).flatten(0, 1) for key in documents[0]}
        distillation = losses.Distillation(model, normalize_scores=False)
        distillation.score_metric = lambda *args, **kwargs: losses.distillation.colbert_kd_scores(*args, **kwargs) / 0.5
        return 0.7 * contrastive + 3.0 * distillation([queries, joined], labels / 0.25)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_it_is_both_losses_of_pylate(encoder, mode, size):
    # ModernBERT rotates in float32, so that gradients of a sum are no sums of gradients.
    model = load_model(encoder("bert")).double()
    batch = batch_of(model, columns=3)
    stock = run(OfPyLate(model), batch, LABELS)
    pylate_fastmaxsim.enable(stock_masking=True)
    loss = ContrastiveDistillation(model, **OPTIONS, **size)
    for _ in range(2):
        assert_equal(run(loss, batch, LABELS), stock)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_it_is_the_same_with_the_flag_as_without(encoder, packed, size):
    model = load_model(encoder("modernbert", local_attention=24), do_query_expansion=False).double()
    batch = batch_of(model, columns=3)
    loss = ContrastiveDistillation(model, **OPTIONS, **size)
    padded = run(loss, batch, LABELS)
    padded_tokens = [call["input_ids"].numel() for call in calls_of(model, lambda: loss(batch, LABELS))]
    pylate_fastmaxsim.enable()
    assert_equal(run(loss, batch, LABELS), padded)
    tokens = [call["input_ids"].numel() for call in calls_of(model, lambda: loss(batch, LABELS))]
    assert sum(tokens) < 0.8 * sum(padded_tokens)
    if size.get("mini_batch_tokens"):
        assert max(tokens + padded_tokens) <= 70 and len(tokens) > 1
    with torch.no_grad():
        torch.testing.assert_close(loss(batch, LABELS), padded[0])


def test_chunks_of_queries_leave_the_gradient_of_all(model, monkeypatch):
    batch = batch_of(model, columns=3)
    whole = run(ContrastiveDistillation(model, **OPTIONS), batch, LABELS)
    monkeypatch.setattr("pylate_fastmaxsim.losses.contrastive_distillation.queries_at_once", lambda *_: 4)
    assert_equal(run(ContrastiveDistillation(model, **OPTIONS, mini_batch_size=6), batch, LABELS), whole)


def test_dropout_and_autocast_are_those_of_the_first_pass(encoder):
    model = load_model(encoder("modernbert", mlp_dropout=0.2))
    loss = ContrastiveDistillation(model, mini_batch_size=2)
    made, batch = [], batch_of(model, columns=3)
    model.register_forward_hook(lambda _module, _args, output: made.append(output["token_embeddings"].detach()))
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(batch, LABELS)
    value.backward()
    half = len(made) // 2
    assert half == 12
    assert all(torch.equal(*pair) for pair in zip(made[:half], made[half:], strict=True))


def test_columns_as_for_distillation(model):
    batch = batch_of(model, columns=3)
    texts = [text for row in zip(*(sentences(6, seed=1 + i) for i in range(3)), strict=True) for text in row]
    joined = [batch[0], features(model, sentences(1), texts)[1]]
    loss = ContrastiveDistillation(model, mini_batch_tokens=100)
    assert_equal(run(loss, joined, LABELS), run(loss, batch, LABELS))


def test_what_cannot_be_is_said_in_a_sentence(model):
    batch = batch_of(model, columns=3)
    with pytest.raises(ValueError, match=r"\[B, N\] = \[6, 3\], got \(6, 2\)"):
        ContrastiveDistillation(model)(batch, LABELS[:, :2])
    with pytest.raises(ValueError, match=r"at least two, \[B, N\] = \[6, 1\]"):
        ContrastiveDistillation(model)(batch[:2], LABELS[:, :1])
    with pytest.raises(ValueError, match="temperature must be a number above 0, got 0"):
        ContrastiveDistillation(model, teacher_temperature=0)
    with pytest.raises(ValueError, match="not both"):
        ContrastiveDistillation(model, mini_batch_size=1, mini_batch_tokens=1)
    with pytest.raises(ValueError, match="mini_batch_size must be at least 1, got 0"):
        ContrastiveDistillation(model, mini_batch_size=0)


def test_the_pooling_of_the_flag(model):
    from pylate_fastmaxsim import TopK

    batch = batch_of(model, columns=3)
    loss = ContrastiveDistillation(model)
    maximum = run(loss, batch, LABELS)
    with pylate_fastmaxsim.enabled(pooling=TopK(2)):
        pooled = run(loss, batch, LABELS)
        queries, documents = pylate_fastmaxsim.encode(model, batch)
        scores = pylate_fastmaxsim.pooled_scores(queries, documents, pooling=TopK(2))
    own = torch.arange(18).view(6, 3)
    expected = F.cross_entropy(scores, own[:, 0])
    student = scores.gather(1, own).log_softmax(1)
    expected = expected + F.kl_div(student, LABELS.softmax(1), reduction="batchmean")
    torch.testing.assert_close(pooled[0], expected.detach())
    assert pooled[0] != maximum[0]
