"""Losses of a MultiVectorEncoder in two real processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from models import attend_to_own_document
from multi_vector import batch_of_rank
from ranks import loss_and_gradients
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.multi_vector_encoder import losses
from sharding import data_parallel, flat_sharded, fully_sharded

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.encoding import attention as encoding_attention
from pylate_fastmaxsim.integrations.encoding import modes

pytestmark = pytest.mark.process

RANKS = 2


def _compare(
    loss_class,
    wrap: Callable,
    mode: str,
    packs: tuple[bool, bool] = (True, True),
    checkpointing: bool = False,
    **options,
) -> Callable[[str], None]:
    def run(folder: str) -> None:
        torch.manual_seed(0)
        core = MultiVectorEncoder(f"{folder}/modernbert", device="cpu").double().train()
        if checkpointing:
            core[0].auto_model.gradient_checkpointing_enable({"use_reentrant": False})
        transformer, batch = core[0], batch_of_rank(core)
        loss_function = loss_class(wrap(core), **options)
        step = partial(loss_and_gradients, core, loss_function, batch)
        stock = step()
        if packs[dist.get_rank()]:
            encoding_attention.variable_length_attention = attend_to_own_document
        with pylate_fastmaxsim.enabled():
            step()
            ours = step()
            found = set(modes.chosen.get(transformer, {}).values()) or {"padded"}
        assert found == {mode if packs[dist.get_rank()] else "grouped"}
        assert ours[0] == pytest.approx(stock[0], rel=2e-6)
        largest = max(gradient.abs().max() for gradient in stock[1].values())
        for name, gradient in stock[1].items():
            assert (ours[1][name] - gradient).abs().max() <= 3e-6 * largest, name

    return run


_CONTRASTIVE, _CACHED = (
    losses.MultiVectorMultipleNegativesRankingLoss,
    losses.CachedMultiVectorMultipleNegativesRankingLoss,
)
_NONE = False, False

CASES = {
    "contrastive": _compare(_CONTRASTIVE, data_parallel, "packed"),
    "gathered": _compare(_CONTRASTIVE, data_parallel, "packed", gather_across_devices=True),
    "cached": _compare(_CACHED, data_parallel, "packed", mini_batch_size=4, gather_across_devices=True),
    "cached-grouped": _compare(_CACHED, data_parallel, "grouped", _NONE, mini_batch_size=4),
    "cached-flat-sharded": _compare(_CACHED, flat_sharded, "packed", mini_batch_size=1),
    "checkpointed": _compare(_CONTRASTIVE, data_parallel, "packed", checkpointing=True),
    "one-packs": _compare(_CONTRASTIVE, data_parallel, "packed", (True, False), gather_across_devices=True),
    "fully-sharded": _compare(_CONTRASTIVE, fully_sharded, "padded"),
    "flat-sharded": _compare(_CONTRASTIVE, flat_sharded, "packed"),
}


@pytest.mark.parametrize("case", CASES)
def test_ranks(outcomes, case):
    assert outcomes(case) == ["passed"] * RANKS
