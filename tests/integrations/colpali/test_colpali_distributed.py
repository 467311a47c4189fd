"""colpali-engine's losses over the pages of two processes, as its trainer gathers them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("colpali_engine", reason='needs colpali-engine: pip install -e ".[test]"')

from colpali_engine import loss as colpali_losses
from colpali_engine.trainer.contrastive_trainer import concat_all_gather

import pylate_fastmaxsim

RANKS, QUERIES = 2, 3
LOSSES = ("ColbertLoss", "ColbertPairwiseCELoss", "ColbertNegativeCELoss", "ColbertPairwiseNegativeCELoss")


def embeddings(rank: int) -> list[Tensor]:
    """Queries, pages and negatives of a rank. Its first page has a row of zeros, as pages have that are padded."""
    generator = torch.Generator().manual_seed(rank)
    shapes = (QUERIES, 6, 16), (QUERIES, 11, 16), (QUERIES, 2, 9, 16)
    made = [F.normalize(torch.randn(*shape, generator=generator) + 0.3, dim=-1) for shape in shapes]
    made[1][0, 0] = 0
    return made


def run(rank: int, name: str, gather: bool) -> tuple[Tensor, list[Tensor]]:
    """The loss of a rank and the gradients of its queries and of pages: its own, or all where they are not gathered."""
    queries, pages, negatives = embeddings(rank)
    if not gather:
        pages = torch.cat([embeddings(other)[1] for other in range(RANKS)])
    leaves = [queries.requires_grad_(), pages.requires_grad_()]
    inputs = [queries, concat_all_gather(pages) if gather else pages]
    loss = getattr(colpali_losses, name)()
    value = loss(*inputs, *([negatives] if "Negative" in name else []), offset=rank * QUERIES)
    value.backward()
    return value.detach(), [leaf.grad for leaf in leaves]


def _process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    for name in LOSSES:
        # In one process, where stock's gradients are right: pages get those of both ranks' losses.
        alone = [run(other, name, gather=False) for other in range(RANKS)]
        pages = sum(gradients[1] for _, gradients in alone)[rank * QUERIES : (rank + 1) * QUERIES]
        with pylate_fastmaxsim.enabled():
            value, gradients = run(rank, name, gather=True)
        torch.testing.assert_close(value, alone[rank][0], rtol=1e-5, atol=0)
        for mine, expected in zip(gradients, (alone[rank][1][0], pages), strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    (Path(folder) / f"passed-{rank}").touch()
    dist.destroy_process_group()


@pytest.mark.process
def test_gathered_pages_get_the_gradients_of_all_ranks(tmp_path):
    mp.spawn(_process, (str(tmp_path),), nprocs=RANKS)
    assert sorted(path.name for path in tmp_path.glob("passed-*")) == ["passed-0", "passed-1"]
