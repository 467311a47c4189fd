"""A MultiVectorEncoder on two GPUs, each with a process of its own. NCCL."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from multi_vector import batch_of_rank
from ranks import loss_and_gradients, run_cases
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.multi_vector_encoder import losses
from sharding import data_parallel

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.encoding import modes

RANKS = 2


def _compare(loss_class, mode: str, compiled: bool = False, **options) -> Callable[[str], None]:
    """In bf16, which is packed, or in float32, which is not."""
    bf16 = mode == "packed"

    def run(folder: str) -> None:
        torch.manual_seed(0)
        core = MultiVectorEncoder(f"{folder}/modernbert", device=f"cuda:{dist.get_rank()}").train()
        batch = [
            {key: value.cuda() if torch.is_tensor(value) else value for key, value in column.items()}
            for column in batch_of_rank(core)
        ]
        loss_function = loss_class(data_parallel(core), gather_across_devices=True, **options)
        stock = loss_and_gradients(core, loss_function, batch)

        def in_bf16(columns: list[dict]) -> torch.Tensor:
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=bf16):
                return loss_function(columns)

        pylate_fastmaxsim.enable(compile=compiled)
        for _ in range(3):
            ours = loss_and_gradients(core, in_bf16, batch)
        assert set(modes.chosen.get(core[0], {}).values()) == {mode}
        assert ours[0] == pytest.approx(stock[0], rel=0.02 if bf16 else 2e-5)
        own, exact = (torch.cat([gradient.flatten() for gradient in each[1].values()]) for each in (ours, stock))
        # A winner that bf16 picks otherwise moves the few gradients here by a fifth, in stock too.
        assert (own - exact).norm() < (0.4 if bf16 else 1e-4) * exact.norm()
        # The ranks have shared their gradients.
        other = own.clone()
        dist.broadcast(other, src=0)
        assert torch.equal(own, other)

    return run


_CONTRASTIVE, _CACHED = (
    losses.MultiVectorMultipleNegativesRankingLoss,
    losses.CachedMultiVectorMultipleNegativesRankingLoss,
)

CASES = {
    "contrastive": _compare(_CONTRASTIVE, "packed"),
    "contrastive-compiled": _compare(_CONTRASTIVE, "packed", compiled=True),
    "contrastive-float32": _compare(_CONTRASTIVE, "grouped"),
    "cached": _compare(_CACHED, "packed", mini_batch_size=2),
    "cached-compiled": _compare(_CACHED, "packed", compiled=True, mini_batch_size=2),
    "cached-float32": _compare(_CACHED, "grouped", mini_batch_size=2),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    return run_cases(__name__, RANKS, tmp_path_factory.mktemp("ranks"), backend="nccl")


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs two GPUs")
@pytest.mark.parametrize("case", CASES)
def test_ranks(outcomes, case):
    assert outcomes(case) == ["passed"] * RANKS
