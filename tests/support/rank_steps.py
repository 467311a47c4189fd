"""Losses in several processes, ours against stock."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.encoding import attention as encoding_attention
from pylate_fastmaxsim.integrations.encoding import modes
from pylate_fastmaxsim.integrations.models.wrappers import unwrap
from tests.support.compared import distance
from tests.support.hosts import host_of
from tests.support.models import attend_to_own_document, build_model, checkpointed, features, sentences


def texts_of(rank: int, queries: int = 6) -> list[list[str]]:
    """Queries and two columns of documents, short on rank 0, long on rank 1: alone each would divide them otherwise."""
    columns = (sentences(queries, longest=(6, 40)[rank], seed=10 * column + rank) for column in (1, 2))
    return [sentences(queries, longest=8, seed=rank), *columns]


def batch_of(model, *sizes: int) -> list[dict]:
    """Of a ColBERT."""
    return features(model, *texts_of(*sizes))


def compare_host(
    name: str,
    loss: str,
    wrap: Callable[[nn.Module], nn.Module] = DistributedDataParallel,
    packs: tuple[bool, bool] = (True, True),
    mode: str = "packed",
    checkpointing: bool = False,
    compiled: bool = False,
    load: dict = {},  # noqa: B006
    **options: object,
) -> Callable[[str], None]:
    """Loss and gradients of each rank are those of stock. ``mode``: of a rank that ``packs``, on a GPU in bf16."""

    def run(folder: str) -> None:
        host, rank, on_gpu = host_of(name), dist.get_rank(), dist.get_backend() == "nccl"
        path = Path(folder) / "modernbert"
        if host.changes:
            path = path.with_name(name)
            if rank == 0 and not path.exists():
                build_model(path, "modernbert", local_attention=24, **host.changes)
            dist.barrier()
        core = host.load(str(path), **load)
        core = core.float().to(f"cuda:{rank}") if on_gpu else core
        if checkpointing:
            checkpointed([host.transformer(core)])
        # Sharding may put another module in the place of what calls the encoder, and around a model.
        decided_by, wrapped = host.decided_by(core), wrap(core)
        step = host.step_of_rank(core, wrapped, loss, rank, **options)
        stock = step.run()
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        if packs[rank] and not on_gpu:
            encoding_attention.variable_length_attention = attend_to_own_document
        bf16 = on_gpu and packs[rank]
        with pytest.MonkeyPatch.context() as patch:
            if host.watches_stock:  # which embeds few tokens on a CPU by stock
                patch.setattr("pylate_fastmaxsim.integrations.sparse_encoder.encoder.FEW_TOKENS", 0)
            if compiled and not on_gpu:  # what is traced is run as it is, in a third of the time of compiling it
                patch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
            seen = host.watch(core, patch)
            with pylate_fastmaxsim.enabled(compile=compiled, **host.options):
                for _ in range(2):
                    seen.clear()
                    ours = step.run(bf16)
                if name == "PyLate" and loss == "contrastive" and mode == "packed" and all(packs):
                    assert set(modes.joined[unwrap(wrapped)].values()) == {True}
                found = {
                    found for key in (decided_by, unwrap(wrapped)) for found in modes.chosen.get(key, {}).values()
                } or {"padded"}
        assert found == {mode if packs[rank] else "grouped"}
        assert bool(seen) != host.watches_stock, "the fast path was not taken"
        assert not compiled or torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
        if not on_gpu:
            step.assert_equal(ours, stock)
            return
        assert ours[0].item() == pytest.approx(stock[0].item(), rel=0.02 if bf16 else 2e-5)
        # A winner that bf16 picks otherwise moves the few gradients here by a fifth, in stock too.
        assert distance(ours, stock) < (0.4 if bf16 else 1e-4)

    return run
