"""Losses beside those of PyLate, and ``encode``, on a GPU in 16 bits: as exact as stock, packed, in CUDA graphs."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from pylate import losses
from pylate.losses.contrastive import extract_skiplist_mask
from torch import nn
from torch.nn import functional as F

import pylate_fastmaxsim
from pylate_fastmaxsim import encode, maxsim
from pylate_fastmaxsim.integrations.encoding import modes
from pylate_fastmaxsim.losses import ContrastiveDistillation, Matryoshka
from tests.support.losses_cuda import assert_as_exact, batch_of, losses_of, stock_losses
from tests.support.models import features, load_model, sentences
from tests.support.on_gpu import no_waiting

pytestmark = pytest.mark.cuda

VIEWS = {"dims": (16, 6), "weights": (1.0, 0.5), "document_tokens": (None, 3), "token_weights": (2.0, 1.0)}


@pytest.fixture
def wide(encoder):
    """A ModernBERT whose local layers see all of a query, so that queries are encoded with the documents."""
    path = encoder("modernbert", hidden_size=64, intermediate_size=96, local_attention=24)
    return load_model(path, document_length=48, device="cuda")


@pytest.fixture
def labels():
    return torch.rand(16, 2, generator=torch.Generator().manual_seed(0)).cuda()


def scored_by(labels, loss_class, **options):
    """A loss that is given these scores of a teacher."""

    def make(model):
        loss = loss_class(model, **options)
        return lambda columns, _: loss(columns, labels)

    return make


class ByHand(nn.Module):
    def __init__(self, model: nn.Module, distillation_weight: float = 1.0) -> None:
        super().__init__()
        self.model, self.weight = model, distillation_weight

    def forward(self, columns, labels):
        queries, documents = encode(self.model, columns)
        scores, own = maxsim(queries, documents), torch.arange(len(documents), device="cuda").view(len(queries), -1)
        distillation = F.kl_div(scores.gather(1, own).log_softmax(1), labels.softmax(1), reduction="batchmean")
        return F.cross_entropy(scores, own[:, 0]) + self.weight * distillation


def of_pylate(model, batch, labels):
    """Both losses of PyLate, one after the other, in autocast and in float32."""
    queries, *documents = [{key: value for key, value in column.items() if key != "token_total"} for column in batch]
    joined = {key: torch.stack([column[key] for column in documents], dim=1).flatten(0, 1) for key in documents[0]}
    contrastive = stock_losses(model, [batch])
    distillation = stock_losses(
        model, [[queries, joined]], scored_by(labels, losses.Distillation, normalize_scores=False)
    )
    return tuple(
        (of_one[0] + 3 * of_other[0], {name: of_one[1][name] + 3 * of_other[1][name] for name in of_one[1]})
        for of_one, of_other in zip(contrastive, distillation, strict=True)
    )


def test_encode_is_as_exact_as_the_model(wide):
    batch = batch_of(wide)
    columns = [{key: value for key, value in column.items() if key != "token_total"} for column in batch]
    masks = extract_skiplist_mask(columns, wide.skiplist)
    masks[0][:] = True

    def by_stock():
        found = [F.normalize(wide(dict(column))["token_embeddings"].float(), dim=-1) for column in columns]
        queries, *documents = [list(map(torch.Tensor.__getitem__, *pair)) for pair in zip(found, masks, strict=True)]
        return torch.cat(queries), torch.cat([text for row in zip(*documents, strict=True) for text in row])

    def by_encode():
        return [texts.to_padded()[0][texts.to_padded()[1]].float() for texts in encode(wide, batch)]

    with torch.no_grad():
        exact = by_stock()
        for enabled in (False, True):
            if enabled:
                pylate_fastmaxsim.enable()
            for ours, wanted in zip(by_encode(), exact, strict=True):
                torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=0)
            with torch.autocast("cuda", torch.bfloat16):
                for ours, rounded, wanted in zip(by_encode(), by_stock(), exact, strict=True):
                    assert (ours - wanted).norm() <= 1.25 * (rounded - wanted).norm() + 0.01 * wanted.norm()
    assert set(modes.chosen[wide].values()) == {"grouped", "packed"}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "loss_class",
    [ByHand, ContrastiveDistillation, partial(ContrastiveDistillation, mini_batch_tokens=300)],
    ids=["encode", "one pass", "by tokens"],
)
def test_contrastive_and_distillation(wide, labels, loss_class, compiled):
    batch = batch_of(wide)
    expected = of_pylate(wide, batch, labels)
    with pylate_fastmaxsim.enabled(compile=compiled, stock_masking=True):
        for _ in range(4 if compiled else 1):
            ours = losses_of(wide, [batch], scored_by(labels, loss_class, distillation_weight=3.0))
    if loss_class is ByHand:  # a masked token wins with the similarity 0 in stock only
        expected = stock_losses(wide, [batch], scored_by(labels, loss_class, distillation_weight=3.0))
    assert_as_exact(ours, expected)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize(
    "loss_class",
    [losses.Contrastive, partial(losses.CachedContrastive, mini_batch_size=5), losses.Distillation],
    ids=["contrastive", "cached", "distillation"],
)
def test_matryoshka(wide, loss_class, pooled, compiled):
    batch, labels = batch_of(wide), None
    if loss_class is losses.Distillation:
        loss_class = partial(loss_class, normalize_scores=False)
        batch = features(wide, sentences(8, longest=8), sentences(24, seed=1))
        labels = torch.rand(8, 3, generator=torch.Generator().manual_seed(0)).cuda()
    make = scored_by(labels, lambda model: Matryoshka(model, loss_class(model), **VIEWS, pooled=pooled))
    expected = stock_losses(wide, [batch], make)
    with pylate_fastmaxsim.enabled(compile=compiled, stock_masking=True):
        for _ in range(4 if compiled else 1):
            ours = losses_of(wide, [batch], make)
        assert set(modes.chosen[wide].values()) == {"packed"}
    assert_as_exact(ours, expected)


@pytest.mark.parametrize(
    "loss_class",
    [
        ByHand,
        ContrastiveDistillation,
        lambda model: Matryoshka(model, ContrastiveDistillation(model), **VIEWS),
        lambda model: Matryoshka(model, ContrastiveDistillation(model), **VIEWS, pooled=True),
    ],
    ids=["encode", "both", "first tokens", "pooled tokens"],
)
def test_a_step_waits_for_nothing(wide, labels, loss_class):
    pylate_fastmaxsim.enable()
    batch, loss = batch_of(wide), loss_class(wide)

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            value = loss([dict(column) for column in batch], labels)
        value.backward()

    step()
    torch.cuda.synchronize()
    with no_waiting():
        step()
