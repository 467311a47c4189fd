"""Losses of every host in two real processes: loss and gradients of each rank are those of stock."""

import importlib.util
from functools import partial
from types import MethodType
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import convert_outputs_to_fp32
from torch.nn import functional as F

import pylate_fastmaxsim
from tests.support.compared import assert_equal
from tests.support.hosts import host_of
from tests.support.models import load_model
from tests.support.rank_steps import compare_host
from tests.support.sharding import data_parallel, flat_sharded, fully_sharded

pytestmark = pytest.mark.process

RANKS = 2

NONE = False, False
GATHERED = {"gather_across_devices": True}
# Of a SparseEncoder documents are gathered in all of them.
CASES = {
    "MultiVectorEncoder": {
        "gathered": compare_host("MultiVectorEncoder", "contrastive", **GATHERED),
        "cached": compare_host("MultiVectorEncoder", "cached", mini_batch_size=4, **GATHERED),
        "cached grouped": compare_host("MultiVectorEncoder", "cached", packs=NONE, mini_batch_size=4),
        "cached flat sharded": compare_host("MultiVectorEncoder", "cached", flat_sharded, mini_batch_size=1),
        "checkpointed": compare_host("MultiVectorEncoder", "contrastive", checkpointing=True),
        "one packs": compare_host("MultiVectorEncoder", "contrastive", packs=(True, False), **GATHERED),
        "fully sharded": compare_host("MultiVectorEncoder", "contrastive", fully_sharded, mode="padded"),
        "flat sharded": compare_host("MultiVectorEncoder", "contrastive", flat_sharded),
    },
    "SparseEncoder": {
        "packed": compare_host("SparseEncoder", "contrastive"),
        "one packs": compare_host("SparseEncoder", "contrastive", packs=(True, False)),
        "checkpointed grouped": compare_host("SparseEncoder", "contrastive", packs=NONE, checkpointing=True),
        "checkpointed": compare_host("SparseEncoder", "contrastive", checkpointing=True),
        "cached": compare_host("SparseEncoder", "cached"),
        "cached grouped": compare_host("SparseEncoder", "cached", packs=NONE),
    },
}


def fused(folder: str, wrap, loss: str = "contrastive", **options: object) -> None:
    """The head of a ColBERT is fused: the weight of its Dense module may be sharded, and its gradient arrives."""

    from pylate_fastmaxsim.integrations.pylate import fused_head

    project = fused_head.project_normalize
    with mock.patch.object(fused_head, "project_normalize", side_effect=project) as projected:
        compare_host("PyLate", loss, wrap, **options)(folder)
    assert {call.args[1].shape for call in projected.call_args_list} == {(16, 32)}


def hook_on_one_rank(folder: str, loss: str, **options: object) -> None:
    """Under mixed precision a rank without a fused head has float32 embeddings, and all score in that then."""

    from pylate_fastmaxsim.integrations.pylate import losses as pylate_losses

    core = load_model(f"{folder}/modernbert")
    # As accelerate does.
    forward = torch.autocast("cpu", torch.bfloat16)(core.forward.__func__)
    core.forward = MethodType(convert_outputs_to_fp32(forward), core)
    if dist.get_rank() == 0:
        core.register_forward_hook(lambda *_args: None)
    wrapped = data_parallel(core, broadcast_buffers=False)
    step = host_of("PyLate").step_of_rank(core, wrapped, loss, dist.get_rank(), **GATHERED, **options)
    stock, said = step.run(), []
    with (
        pylate_fastmaxsim.enabled(stock_masking=True),
        mock.patch.object(pylate_losses, "log_once", lambda message, *values: said.append(message % values)),
    ):
        ours = step.run()
    named = "Documents are scored in torch.float32, the dtype that they have in another process."
    assert said == ([] if dist.get_rank() == 0 else [named])
    assert_equal(ours, stock, 0.1)


unused = partial(data_parallel, find_unused_parameters=True)
CASES["PyLate"] = {
    "grouped": partial(fused, wrap=unused, packs=NONE, mode="grouped"),
    "cached": partial(fused, wrap=data_parallel, loss="cached", mini_batch_size=2),
    "fully sharded": partial(fused, wrap=fully_sharded, **GATHERED),
    "fully sharded checkpointed": partial(fused, wrap=fully_sharded, packs=NONE, checkpointing=True),
    "fully sharded cached": partial(fused, wrap=fully_sharded, loss="cached", mini_batch_size=2),
    "flat sharded": partial(fused, wrap=flat_sharded),
    "hook on one rank": partial(hook_on_one_rank, loss="contrastive"),
    "hook on one rank cached": partial(hook_on_one_rank, loss="cached", mini_batch_size=2),
}


def colpali(_folder: str, name: str) -> None:
    """Losses over the pages of all ranks, as ContrastiveTrainer gathers them. Pages get the gradients of all losses."""

    def embeddings(rank: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(rank)
        shapes = (3, 6, 16), (3, 11, 16), (3, 2, 9, 16)
        made = [F.normalize(torch.randn(*shape, generator=generator) + 0.3, dim=-1) for shape in shapes]
        made[1][0, 0] = 0  # as in pages that are padded
        return made

    def step(rank: int, gather: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The loss of a rank, and gradients of its queries and of pages: its own, or all where they are not gathered."""
        from colpali_engine import loss as colpali_losses
        from colpali_engine.trainer.contrastive_trainer import concat_all_gather

        queries, pages, negatives = embeddings(rank)
        if not gather:
            pages = torch.cat([embeddings(other)[1] for other in range(RANKS)])
        queries.requires_grad_(), pages.requires_grad_()
        given = [queries, concat_all_gather(pages) if gather else pages, *([negatives] if "Negative" in name else [])]
        value = getattr(colpali_losses, name)()(*given, offset=rank * len(queries))
        value.backward()
        return value.detach(), queries.grad, pages.grad

    rank = dist.get_rank()
    # In one process, where stock's gradients are right.
    alone = [step(other, gather=False) for other in range(RANKS)]
    pages = sum(of_pages for _, _, of_pages in alone).chunk(RANKS)[rank]
    with pylate_fastmaxsim.enabled():
        ours = step(rank, gather=True)
    for own, exact in zip(ours, (*alone[rank][:2], pages), strict=True):
        torch.testing.assert_close(own, exact, rtol=1e-5, atol=1e-5 * float(exact.abs().max()))


LOSSES = "ColbertLoss", "ColbertPairwiseCELoss", "ColbertNegativeCELoss", "ColbertPairwiseNegativeCELoss"
HERE = [host for host in CASES if not isinstance(host_of(host), str)]
CASES = {f"{host} {name}": case for host in HERE for name, case in CASES[host].items()}
if importlib.util.find_spec("colpali_engine"):
    CASES |= {f"colpali-engine {name}": partial(colpali, name=name) for name in LOSSES}


@pytest.mark.parametrize("case", CASES)
def test_two_processes(outcomes, case):
    for rank, outcome in enumerate(outcomes(case)):
        assert outcome == "passed", f"rank {rank}: {outcome}"
