"""Losses on two GPUs, each with a process of its own. NCCL."""

import pytest
import torch

from tests.support.hosts import host_of
from tests.support.rank_steps import compare_host

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.skipif(isinstance(host_of("MultiVectorEncoder"), str), reason=str(host_of("MultiVectorEncoder"))),
]

GATHERED = {"gather_across_devices": True}
CASES = {
    "contrastive": compare_host("MultiVectorEncoder", "contrastive", **GATHERED),
    "float32": compare_host("MultiVectorEncoder", "contrastive", packs=(False, False), **GATHERED),
    "cached": compare_host("MultiVectorEncoder", "cached", compiled=True, mini_batch_size=2, **GATHERED),
}


@pytest.mark.parametrize("outcomes", [[2, "nccl"]], indirect=True)
@pytest.mark.parametrize("case", CASES)
def test_two_gpus(outcomes, case):
    assert outcomes(case) == ["passed", "passed"]
