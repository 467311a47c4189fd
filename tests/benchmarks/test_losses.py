"""Losses on stored embeddings, and the search for the largest batch."""

from __future__ import annotations

import pytest
import torch

import pylate_fastmaxsim
from benchmarks.training.ceilings import GRID, ceiling, next_batch


@pytest.mark.parametrize("loss", ["contrastive", "cached_contrastive", "distillation"])
def test_stock_and_fast_have_the_same_loss_on_the_same_embeddings(loss):
    pytest.importorskip("pylate")
    from benchmarks.training.embedded import Step

    def value() -> float:
        return float(Step(loss, 8, 2, 12, torch.device("cpu"), seed=0)())

    stock = value()
    with pylate_fastmaxsim.enabled(padding_free="always"):
        fast = value()
    # Stock's scores are rounded to bfloat16, and divided by a temperature of 0.02.
    assert fast == pytest.approx(stock, rel=0.05)


@pytest.mark.parametrize("limit", [31, 32, 300, 2**21])
def test_the_search_finds_the_largest_batch_that_fits(limit):
    tried = {}
    while (batch := next_batch(tried)) is not None:
        assert batch not in tried and batch in GRID
        tried[batch] = {"status": "ok" if batch <= limit else "out of memory"}
    largest, stopped = ceiling(tried)
    assert largest == max((size for size in GRID if size <= limit), default=None)
    assert (stopped is None) == (limit >= GRID[-1]) and len(tried) <= 5
