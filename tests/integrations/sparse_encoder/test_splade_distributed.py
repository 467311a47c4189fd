"""Losses of a SPLADE model in two real processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist
from sentence_transformers.sparse_encoder import losses

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.encoding import attention as encoding_attention
from pylate_fastmaxsim.integrations.sparse_encoder import encoder as sparse_encoder
from tests.support.models import attend_to_own_document, build_model, sentences
from tests.support.sharding import data_parallel
from tests.support.sparse_encoders import splade, transformer_of
from tests.support.splade_steps import CACHED, assert_equal, batch_of, run, splade_loss

pytestmark = pytest.mark.process

RANKS = 2


def compare(packs: tuple[bool, bool] = (True, True), checkpointing: bool = False, **options) -> Callable[[str], None]:
    """Loss and gradients of each rank, which has texts of other lengths than the other, are those of stock."""

    def compared(folder: str) -> None:
        rank = dist.get_rank()
        path = Path(folder) / "masked-lm"
        if rank == 0 and not path.exists():
            build_model(path, "modernbert", masked_lm=True)
        dist.barrier()
        model = splade(str(path))
        if checkpointing:
            transformer_of(model).auto_model.gradient_checkpointing_enable({"use_reentrant": False})
        longest = (6, 40)[rank]
        texts = [sentences(6, 8, rank), *(sentences(6, longest, 10 * n + rank) for n in (1, 2))]
        batch = batch_of(model, 3, texts)
        base = partial(losses.SparseMultipleNegativesRankingLoss, gather_across_devices=True)
        loss = splade_loss(model, base, **options)
        loss.model = data_parallel(model)
        stock = run(model, loss, batch)
        if packs[rank]:
            encoding_attention.variable_length_attention = attend_to_own_document
        sparse_encoder.FEW_TOKENS = 0
        pooled, operator = [], sparse_encoder.splade_pool
        sparse_encoder.splade_pool = lambda *args, **kwargs: pooled.append(args) or operator(*args, **kwargs)
        pylate_fastmaxsim.enable()
        for _ in range(2):
            assert_equal(run(model, loss, batch), stock)
        sparse_encoder.splade_pool = operator
        assert pooled

    return compared


CASES = {
    "packed": compare(),
    "one-packs": compare((True, False)),
    "grouped-checkpointed": compare((False, False), checkpointing=True),
    "packed-checkpointed": compare(checkpointing=True),
    "cached": compare(**CACHED),
    "cached-grouped": compare((False, False), **CACHED),
}


@pytest.mark.parametrize("case", CASES)
def test_ranks(outcomes, case):
    assert outcomes(case) == ["passed"] * RANKS
