"""``encode`` of a MultiVectorEncoder: a loss by hand gives the loss and the gradients of Sentence Transformers' own."""

from __future__ import annotations

import pytest
import torch
from sentence_transformers.multi_vector_encoder import losses
from torch import nn
from torch.nn import functional as F

import pylate_fastmaxsim
from pylate_fastmaxsim import encode, maxsim
from pylate_fastmaxsim.integrations.sentence_transformers.padding_free import LossColumns
from tests.support.compared import assert_equal
from tests.support.multi_vector import assert_equal as assert_nearly_equal
from tests.support.multi_vector import batch_of, load, run


class ByHand(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, sentence_features, labels):
        queries, documents = encode(self.model, sentence_features)
        scores, own = maxsim(queries, documents), torch.arange(len(documents)).view(len(queries), -1)
        contrastive = F.cross_entropy(scores, own[:, 0])
        return contrastive + F.kl_div(scores.gather(1, own).log_softmax(1), labels.softmax(1), reduction="batchmean")


class Both(ByHand):
    def forward(self, sentence_features, labels):
        contrastive = losses.MultiVectorMultipleNegativesRankingLoss(self.model)
        distillation = losses.MultiVectorDistillKLDivLoss(self.model)
        return contrastive(sentence_features) + distillation(sentence_features, labels)


@pytest.mark.parametrize("family", ["modernbert", "bert"])
def test_a_loss_by_hand(encoder, mode, family, monkeypatch):
    model, joined, keep = load(encoder(family)), [], LossColumns.keep
    monkeypatch.setattr(LossColumns, "keep", lambda *args: joined.append(None) or keep(*args))
    padded = run(model, ByHand(model))
    assert_nearly_equal(padded, run(model, Both(model)))
    pylate_fastmaxsim.enable()
    assert_equal(run(model, ByHand(model)), padded)
    assert len(joined) == (mode == "packed")


def test_texts_in_one_row(encoder):
    """As Sentence Transformers flattens them for FlashAttention, behind which it pads them again."""
    model = load(encoder("bert"))
    batch = batch_of(model)
    stock = encode(model, batch)
    padded = [model(dict(column), task=column["task"]) for column in batch]
    flat = [
        {"input_ids": torch.zeros(1, 3 * index + 9), "cu_seq_lens_q": torch.arange(len(column["input_ids"]) + 1)}
        for index, column in enumerate(batch)
    ]
    outputs = {column["input_ids"].shape[1]: output for column, output in zip(flat, padded, strict=True)}
    model.forward = lambda features, **_: outputs[features["input_ids"].shape[1]]
    for ours, theirs in zip(encode(model, flat), stock, strict=True):
        for own, other in zip(ours.to_padded(), theirs.to_padded(), strict=True):
            torch.testing.assert_close(own, other)
