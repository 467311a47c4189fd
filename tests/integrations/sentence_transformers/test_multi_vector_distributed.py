"""Losses of a MultiVectorEncoder in two real processes."""

from __future__ import annotations

import pytest
from sentence_transformers.multi_vector_encoder import losses

from tests.support.multi_vector import compare
from tests.support.sharding import data_parallel, flat_sharded, fully_sharded

pytestmark = pytest.mark.process

RANKS = 2


_CONTRASTIVE, _CACHED = (
    losses.MultiVectorMultipleNegativesRankingLoss,
    losses.CachedMultiVectorMultipleNegativesRankingLoss,
)
_NONE = False, False

CASES = {
    "gathered": compare(_CONTRASTIVE, data_parallel, "packed", gather_across_devices=True),
    "cached": compare(_CACHED, data_parallel, "packed", mini_batch_size=4, gather_across_devices=True),
    "cached-grouped": compare(_CACHED, data_parallel, "grouped", _NONE, mini_batch_size=4),
    "cached-flat-sharded": compare(_CACHED, flat_sharded, "packed", mini_batch_size=1),
    "checkpointed": compare(_CONTRASTIVE, data_parallel, "packed", checkpointing=True),
    "one-packs": compare(_CONTRASTIVE, data_parallel, "packed", (True, False), gather_across_devices=True),
    "fully-sharded": compare(_CONTRASTIVE, fully_sharded, "padded"),
    "flat-sharded": compare(_CONTRASTIVE, flat_sharded, "packed"),
}


@pytest.mark.parametrize("case", CASES)
def test_ranks(outcomes, case):
    assert outcomes(case) == ["passed"] * RANKS
