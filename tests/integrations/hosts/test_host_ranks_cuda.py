"""Losses on two GPUs, each with a process of its own. NCCL."""

from collections.abc import Callable

import pytest
import torch

from tests.support.hosts import host_of
from tests.support.rank_steps import compare_host
from tests.support.ranks import run_cases

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


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    return run_cases(__name__, 2, tmp_path_factory.mktemp("ranks"), backend="nccl")


@pytest.mark.parametrize("case", CASES)
def test_two_gpus(outcomes, case):
    assert outcomes(case) == ["passed", "passed"]
