"""Losses in several processes, ours against stock."""

from __future__ import annotations

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
from tests.support.compared import assert_equal, distance
from tests.support.hosts import checkpointed, host_of
from tests.support.models import attend_to_own_document, build_model, features, load_model, looking, sentences
from tests.support.ranks import loss_and_gradients


def batch_of(model, rank: int, queries: int = 6):
    """Of a ColBERT. Rank 0 has short documents and rank 1 long ones: each alone would divide them differently."""
    texts = [sentences(queries, longest=8, seed=rank)]
    texts += [sentences(queries, longest=(6, 40)[rank], seed=10 * column + rank) for column in (1, 2)]
    return features(model, *texts)


def compare_host(
    name: str,
    loss: str,
    wrap: Callable[[nn.Module], nn.Module] = DistributedDataParallel,
    packs: tuple[bool, bool] = (True, True),
    mode: str = "packed",
    checkpointing: bool = False,
    compiled: bool = False,
    **options: object,
) -> Callable[[str], None]:
    """Loss and gradients of each rank are those of stock. ``mode``: of a rank that ``packs``.

    On GPUs in bf16, which is packed, or in float32.
    """

    def run(folder: str) -> None:
        host, rank, on_gpu = host_of(name), dist.get_rank(), dist.get_backend() == "nccl"
        path = Path(folder) / "modernbert"
        if host.changes:
            path = path.with_name(name)
            if rank == 0 and not path.exists():
                build_model(path, "modernbert", local_attention=24, **host.changes)
            dist.barrier()
        core = host.load(str(path))
        core = core.float().to(f"cuda:{rank}") if on_gpu else core
        if checkpointing:
            checkpointed(host, core, reentrant=False)
        # Sharding may put another module in the place of what calls the encoder, and around a model.
        decided_by, wrapped = host.decided_by(core), wrap(core)
        step = host.step_of_rank(core, wrapped, loss, rank, **options)
        stock = step.run()
        if packs[rank] and not on_gpu:
            encoding_attention.variable_length_attention = attend_to_own_document
        bf16 = on_gpu and packs[rank]
        with pytest.MonkeyPatch.context() as patch:
            if host.watches_stock:  # which embeds few tokens on a CPU by stock
                patch.setattr("pylate_fastmaxsim.integrations.sparse_encoder.encoder.FEW_TOKENS", 0)
            seen = host.watch(core, patch)
            with pylate_fastmaxsim.enabled(compile=compiled, **host.options):
                for _ in range(2):
                    seen.clear()
                    ours = step.run(bf16)
                found = {
                    found for key in (decided_by, unwrap(wrapped)) for found in modes.chosen.get(key, {}).values()
                } or {"padded"}
        assert found == {mode if packs[rank] else "grouped"}
        assert bool(seen) != host.watches_stock, "the fast path was not taken"
        if not on_gpu:
            step.assert_equal(ours, stock)
            return
        assert ours[0].item() == pytest.approx(stock[0].item(), rel=0.02 if bf16 else 2e-5)
        # A winner that bf16 picks otherwise moves the few gradients here by a fifth, in stock too.
        assert distance(ours, stock) < (0.4 if bf16 else 1e-4)

    return run


def compare(
    loss_class,
    wrapped: bool,
    packed: bool,
    checkpointing: bool = False,
    document_length: int = 32,
    tolerance: float = 1e-10,
    **options,
) -> Callable[[str], None]:
    """Loss and gradients of PyLate's losses are those of stock, and equal on all ranks, which make equally many calls."""

    def run(folder: str) -> None:
        rank = dist.get_rank()
        core = load_model(f"{folder}/modernbert", document_length=document_length).double()
        batch = batch_of(core, rank)
        if checkpointing:
            core[0].auto_model.gradient_checkpointing_enable({"use_reentrant": False})
        model = DistributedDataParallel(core) if wrapped else core
        step = partial(loss_and_gradients, core, loss_class(model, **options), batch)
        stock = step()
        if packed:
            encoding_attention.variable_length_attention = attend_to_own_document
        calls = []
        with pylate_fastmaxsim.enabled(stock_masking=True):
            step()
            core[0].register_forward_pre_hook(looking(lambda _module, args: calls.append(args[0]["input_ids"].numel())))
            ours = step()
            assert set(modes.chosen[core].values()) == {"packed" if packed else "grouped"}
            if packed and getattr(loss_class, "func", loss_class).__name__ == "Contrastive":
                assert set(modes.joined[core].values()) == {True} and len(calls) == 1
        assert_equal(ours, stock, tolerance)
        if wrapped:
            counts = [None] * dist.get_world_size()
            dist.all_gather_object(counts, len(calls))
            assert len(set(counts)) == 1, counts
            # Averaged over the ranks, so equal on all of them.
            total = torch.stack([gradient.sum() for gradient in ours[1].values()]).sum()
            totals = [torch.empty_like(total) for _ in range(dist.get_world_size())]
            dist.all_gather(totals, total)
            torch.testing.assert_close(totals[0], totals[1])

    return run
