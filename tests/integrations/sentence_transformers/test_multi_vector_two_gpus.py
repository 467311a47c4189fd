"""A MultiVectorEncoder on two GPUs, each with a process of its own. NCCL."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sentence_transformers.multi_vector_encoder import losses

from tests.support.multi_vector import compare
from tests.support.ranks import run_cases
from tests.support.sharding import data_parallel

RANKS = 2


_CONTRASTIVE, _CACHED = (
    losses.MultiVectorMultipleNegativesRankingLoss,
    losses.CachedMultiVectorMultipleNegativesRankingLoss,
)

CASES = {
    "contrastive": compare(_CONTRASTIVE, data_parallel, "packed", gather_across_devices=True),
    "float32": compare(_CONTRASTIVE, data_parallel, "grouped", (False, False), gather_across_devices=True),
    "cached": compare(_CACHED, data_parallel, "packed", compiled=True, gather_across_devices=True, mini_batch_size=2),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    return run_cases(__name__, RANKS, tmp_path_factory.mktemp("ranks"), backend="nccl")


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs two GPUs")
@pytest.mark.parametrize("case", CASES)
def test_ranks(outcomes, case):
    assert outcomes(case) == ["passed"] * RANKS
