"""Training on real abstracts: the fast run follows the stock run as closely as rounding lets stock follow itself."""

from __future__ import annotations

import json
from pathlib import Path

import models
import pytest
import torch
from pylate.losses import Contrastive

import pylate_fastmaxsim

CORPUS = Path(__file__).resolve().parents[2] / "shared" / "data" / "cranfield" / "corpus.jsonl"
STEPS, BATCH = 40, 16

pytestmark = pytest.mark.skipif(not CORPUS.exists(), reason=f"the Cranfield collection is not at {CORPUS}")


@pytest.fixture(scope="module")
def pairs() -> list[tuple[str, str]]:
    documents = map(json.loads, CORPUS.read_text(encoding="utf-8").splitlines())
    return [(d["title"], d["text"]) for d in documents if d["title"] and d["text"]][: STEPS * BATCH]


def loss_curve(path: str, pairs: list[tuple[str, str]], order: list[int]) -> torch.Tensor:
    """Losses of a seeded run without dropout; `order` permutes each batch, which changes nothing but rounding."""
    model = models.load_model(path, document_length=120, query_length=32)
    loss = Contrastive(model, temperature=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    curve = []
    for step in range(STEPS):
        rows = [pairs[step * BATCH + row] for row in order]
        value = loss(models.collated(model, *zip(*rows, strict=True)))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        curve.append(value.item())
    return torch.tensor(curve)


def test_the_fast_curve_stays_within_the_rounding_of_stock(encoder, pairs: list[tuple[str, str]]):
    path = encoder("modernbert")
    in_order = list(range(BATCH))
    stock = loss_curve(path, pairs, in_order)
    reordered = [
        loss_curve(path, pairs, torch.randperm(BATCH, generator=torch.Generator().manual_seed(seed)).tolist())
        for seed in range(3)
    ]
    rounding = max((stock - other).abs().max() for other in reordered)
    with pylate_fastmaxsim.enabled(stock_masking=True):
        fast = loss_curve(path, pairs, in_order)
    difference = (stock - fast).abs().max()
    print(
        f"loss {stock[0]:.4f} to {stock[-1]:.4f}; fast differs by {difference:.1e}, reordered stock by {rounding:.1e}"
    )
    assert stock[-5:].mean() < stock[:5].mean()
    assert 0 < rounding < 1e-2
    assert difference <= rounding
