"""Losses of this package in two real processes, under DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from pylate import losses
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.encoding import attention as encoding_attention
from pylate_fastmaxsim.losses import ContrastiveDistillation, Matryoshka
from tests.support.compared import assert_equal
from tests.support.models import attend_to_own_document, load_model, sentences
from tests.support.rank_steps import batch_of
from tests.support.ranks import loss_and_gradients

pytestmark = pytest.mark.process

RANKS = 2
VIEWS = {"dims": (16, 8), "document_tokens": (None, 4), "pooled": True}


def _same(make: Callable[[nn.Module], nn.Module], reference: Callable[[nn.Module], nn.Module], **options) -> Callable:
    """A loss without the flag and with it, grouped and packed, gives what the reference does without."""

    def run(folder: str) -> None:
        rank = dist.get_rank()
        core = load_model(f"{folder}/modernbert").double()
        batch = batch_of(core, rank)
        labels = torch.rand(6, 2, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
        model = DistributedDataParallel(core)

        def step(make: Callable) -> tuple:
            loss = make(model)
            return loss_and_gradients(core, lambda columns: loss(columns, labels), batch)

        stock = step(reference)
        if make is not reference:
            assert_equal(step(make), stock)
        for packed in (False, True):
            if packed:
                encoding_attention.variable_length_attention = attend_to_own_document
            with pylate_fastmaxsim.enabled(**options):
                assert_equal(step(make), stock)

    return run


def _as_pylate(folder: str) -> None:
    """The contrastive term alone is PyLate's, gathered, which multiplies by the number of ranks."""
    core = load_model(f"{folder}/modernbert").double()
    batch, model = batch_of(core, dist.get_rank()), DistributedDataParallel(core)
    labels = torch.zeros(6, 2, dtype=torch.float64)
    stock = loss_and_gradients(core, losses.Contrastive(model, gather_across_devices=True, temperature=0.5), batch)
    options = {
        "contrastive_weight": float(RANKS),
        "distillation_weight": 0.0,
        "temperature": 0.5,
        "gather_across_devices": True,
    }
    with pylate_fastmaxsim.enabled(stock_masking=True):
        for size in ({}, {"mini_batch_tokens": 90}):
            loss = ContrastiveDistillation(model, **options, **size)
            assert_equal(loss_and_gradients(core, partial(loss, labels=labels), batch), stock)


def _pages(folder: str) -> None:
    """GradCache of colpali-engine exchanges the gradients of all mini-batches, once."""
    from colpali_engine.loss import ColbertLoss
    from colpali_engine.models import ColQwen2, ColQwen2Processor

    from pylate_fastmaxsim.losses.colpali import GradCache
    from tests.support.visual_models import build_visual_model, page

    rank = dist.get_rank()
    if rank == 0:
        build_visual_model(f"{folder}/colqwen2", "colqwen2")
    dist.barrier()
    processor, core = (kind.from_pretrained(f"{folder}/colqwen2") for kind in (ColQwen2Processor, ColQwen2))
    model = DistributedDataParallel(core.double().train(), find_unused_parameters=True)
    queries = processor.process_texts(sentences(4, longest=6, seed=rank))
    pages = processor.process_images([page(4 * rank + number) for number in range(4)])

    def step(model: nn.Module, finish: Callable) -> tuple:
        core.zero_grad()
        loss = finish(ColbertLoss(temperature=0.2)(model(**queries), model(**pages)))
        loss.backward()
        weights = core.named_parameters()
        return loss.detach(), {name: weight.grad.clone() for name, weight in weights if weight.grad is not None}

    stock = step(model, lambda loss: loss)
    with pylate_fastmaxsim.enabled():
        cached = GradCache(model, 3)
        # Norms of the model are computed in float32.
        assert_equal(step(cached, cached.with_second_passes), stock, 1e-6)


_both = partial(ContrastiveDistillation, temperature=0.5, distillation_weight=2.0, gather_across_devices=True)


def _matryoshka(model: nn.Module) -> nn.Module:
    loss = losses.CachedContrastive(model, mini_batch_size=2, gather_across_devices=True)
    return Matryoshka(model, loss, **VIEWS)


CASES = {
    "by tokens": _same(partial(_both, mini_batch_tokens=90), _both),
    "matryoshka": _same(_matryoshka, _matryoshka, stock_masking=True),
    "as pylate": _as_pylate,
    "pages": _pages,
}


@pytest.mark.parametrize("case", CASES)
def test_two_processes(outcomes, case):
    assert outcomes(case) == ["passed"] * RANKS
