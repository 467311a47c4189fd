"""ContrastiveDistillation of a MultiVectorEncoder in two real processes, gathered, with and without GradCache."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.multi_vector_encoder import losses
from torch.nn.parallel import DistributedDataParallel

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.encoding import attention as encoding_attention
from pylate_fastmaxsim.losses import ContrastiveDistillation
from tests.support.compared import assert_equal
from tests.support.models import attend_to_own_document
from tests.support.multi_vector import assert_equal as assert_nearly_equal
from tests.support.multi_vector import batch_of_rank
from tests.support.ranks import loss_and_gradients

pytestmark = pytest.mark.process

RANKS = 2


def _gathered(folder: str) -> None:
    torch.manual_seed(0)
    core = MultiVectorEncoder(f"{folder}/modernbert", device="cpu").double().train()
    batch, model = batch_of_rank(core), DistributedDataParallel(core)
    labels = torch.rand(6, 2, generator=torch.Generator().manual_seed(dist.get_rank()), dtype=torch.float64)

    def step(**options) -> tuple:
        loss = ContrastiveDistillation(model, temperature=0.5, gather_across_devices=True, **options)
        return loss_and_gradients(core, lambda columns: loss(columns, labels), batch)

    of_host = losses.MultiVectorMultipleNegativesRankingLoss(model, scale=2.0, gather_across_devices=True)
    of_host = loss_and_gradients(core, of_host, batch)
    assert_nearly_equal(step(distillation_weight=0.0), of_host)
    both = step()
    encoding_attention.variable_length_attention = attend_to_own_document
    for size in ({}, {"mini_batch_tokens": 60}):
        with pylate_fastmaxsim.enabled():
            assert_equal(step(**size), both)


CASES = {"gathered": _gathered}


@pytest.mark.parametrize("case", CASES)
def test_two_processes(outcomes, case):
    assert outcomes(case) == ["passed"] * RANKS
