"""Losses in two processes of DistributedDataParallel: a slice of test_encode_distributed.py for the default run."""

from __future__ import annotations

import pytest
from pylate import losses

from tests.support.rank_steps import compare

pytestmark = [pytest.mark.process, pytest.mark.smoke]

RANKS = 2

CASES = {
    "contrastive gathered": compare(losses.Contrastive, True, True, gather_across_devices=True),
    "cached": compare(losses.CachedContrastive, True, True, mini_batch_size=2),
}


@pytest.mark.parametrize("case", CASES)
def test_two_processes(outcomes, case):
    assert outcomes(case) == ["passed"] * RANKS
