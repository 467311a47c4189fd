"""Losses in two real processes, under DistributedDataParallel: those of the host for the default run, and ours."""

import importlib.util
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.encoding import attention as encoding_attention
from pylate_fastmaxsim.losses import ContrastiveDistillation, Matryoshka, PooledContrastive
from tests.support.compared import assert_equal, found, run
from tests.support.loss_hosts import HOST
from tests.support.models import attend_to_own_document, sentences
from tests.support.rank_steps import texts_of

pytestmark = [pytest.mark.process, pytest.mark.smoke]

RANKS = 2
VIEWS = {"dims": (16, 8), "document_tokens": (None, 4), "pooled": True}


def _started(folder: str) -> tuple[nn.Module, Callable[[Callable], tuple]]:
    """A model in DistributedDataParallel, and its step with a loss."""
    rank = dist.get_rank()
    core = HOST.load(f"{folder}/modernbert")
    batch = HOST.columns(core, *texts_of(rank))
    labels = torch.rand(6, 2, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    model = DistributedDataParallel(core)
    return model, lambda loss: run(loss, batch, labels)


def _same(folder: str, makes: list[Callable[[nn.Module], nn.Module]], **options) -> None:
    """Losses without the flag and with it, grouped and packed, give what the first of them does without."""
    model, step = _started(folder)
    stock = step(makes[0](model))
    for make in makes[1:]:
        assert_equal(step(make(model)), stock, 1e-7)
    for packed in (False, True):
        if packed:
            encoding_attention.variable_length_attention = attend_to_own_document
        with pylate_fastmaxsim.enabled(**options):
            for make in makes:
                assert_equal(step(make(model)), stock, HOST.tolerance)


def _as_host(folder: str) -> None:
    model, step = _started(folder)
    of_host, times = HOST.gathered(model, RANKS)
    stock = step(of_host)
    options = {"contrastive_weight": times, "distillation_weight": 0.0, "temperature": 0.5}
    with pylate_fastmaxsim.enabled(**HOST.exactly):
        assert_equal(step(HOST.gathered(model, RANKS)[0]), stock, HOST.tolerance)
        for size in ({}, {"mini_batch_tokens": 90}):
            loss = ContrastiveDistillation(model, **options, gather_across_devices=True, **size)
            assert_equal(step(loss), stock, HOST.tolerance)


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

    def step(model: nn.Module, finish: Callable = lambda loss: loss) -> tuple:
        core.zero_grad()
        loss = finish(ColbertLoss(temperature=0.2)(model(**queries), model(**pages)))
        loss.backward()
        return found(core, loss)

    stock = step(model)
    with pylate_fastmaxsim.enabled():
        cached = GradCache(model, 3)
        # Norms of the model are computed in float32.
        assert_equal(step(cached, cached.with_second_passes), stock, 1e-6)


_both = partial(ContrastiveDistillation, temperature=0.5, distillation_weight=2.0, gather_across_devices=True)
_pooled = partial(PooledContrastive, factors=(1, 2.5), gather_across_devices=True)


def _cut(model: nn.Module) -> nn.Module:
    return Matryoshka(model, HOST.with_gradcache(model, gather_across_devices=True)[0], **VIEWS)


CASES = {
    "as host": _as_host,
    "cached": partial(_same, makes=[lambda model: HOST.with_gradcache(model)[0]], **HOST.exactly),
    "by tokens": partial(_same, makes=[_both, partial(_both, mini_batch_tokens=90)]),
    "pooled": partial(_same, makes=[_pooled, partial(_pooled, mini_batch_tokens=90)]),
    "matryoshka": partial(_same, makes=[_cut], **HOST.exactly),
}
if importlib.util.find_spec("colpali_engine") and HOST.exactly:
    CASES["pages"] = _pages


@pytest.mark.parametrize("case", CASES)
def test_two_processes(outcomes, case):
    assert outcomes(case) == ["passed"] * RANKS
