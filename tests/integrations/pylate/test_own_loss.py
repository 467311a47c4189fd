"""A loss of one's own under PyLate: a line of log says that its documents are encoded with padding, and how not to."""

import pytest
import torch

pytest.importorskip("pylate")

from pylate import losses, models, scores

import pylate_fastmaxsim
from tests.support.pylate_steps import OtherScores

SAID = "A loss of your own calls the model, which encodes its documents with padding"


class OwnLoss(torch.nn.Module):
    def __init__(self, model: models.ColBERT, metric=scores.colbert_scores) -> None:
        super().__init__()
        self.model, self.metric = model, metric

    def forward(self, columns, labels=None):
        queries, documents = (self.model(column)["token_embeddings"] for column in columns)
        return self.metric(queries, documents).sum()


class EncodedLoss(OwnLoss):
    def forward(self, columns, labels=None):
        return pylate_fastmaxsim.maxsim(*pylate_fastmaxsim.encode(self.model, columns)).sum()


LOSSES = {
    "own": (OwnLoss, {}, 1),
    "own, with XTR": (lambda model: OwnLoss(model, lambda q, d: scores.XTRScores(k=4)(q, d[:, None])), {}, 1),
    "own, without leaving out padding": (OwnLoss, {"padding_free": False}, 0),
    "with encode": (EncodedLoss, {}, 0),
    "of PyLate": (losses.Contrastive, {}, 0),
    "of PyLate, as it came": (lambda model: losses.Contrastive(model, score_metric=OtherScores()), {}, 0),
}


@pytest.mark.parametrize("build, options, count", LOSSES.values(), ids=LOSSES)
def test_a_loss_that_calls_the_model_is_told(model, caplog, build, options, count):
    columns = [model.tokenize(["one", "two words"], is_query=side) for side in (True, False)]
    pylate_fastmaxsim.enable(**options)
    loss = build(model)
    for _ in range(2):
        loss([dict(column) for column in columns]).backward()
    with torch.no_grad():
        loss([dict(column) for column in columns])
    assert caplog.text.count(SAID) == count
