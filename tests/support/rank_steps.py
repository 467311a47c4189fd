"""Losses of PyLate in several processes, ours against stock."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from pylate import losses
from torch.nn.parallel import DistributedDataParallel

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.encoding import attention as encoding_attention
from pylate_fastmaxsim.integrations.encoding import modes
from tests.support.compared import assert_equal
from tests.support.models import attend_to_own_document, features, load_model, looking, sentences
from tests.support.ranks import loss_and_gradients


def batch_of(model, rank: int, queries: int = 6):
    """A batch of this rank. Rank 0 has short documents and rank 1 long ones: each alone would divide them differently."""
    longest = (6, 40)[rank]
    texts = [sentences(queries, longest=8, seed=rank)]
    texts += [sentences(queries, longest=longest, seed=10 * column + rank) for column in (1, 2)]
    return features(model, *texts)


def compare(
    loss_class,
    wrapped: bool,
    packed: bool,
    checkpointing: bool = False,
    document_length: int = 32,
    tolerance: float = 1e-10,
    **options,
) -> Callable[[str], None]:
    """Loss and gradients are those of stock, and equal on all ranks, which make equally many calls."""

    def run(folder: str) -> None:
        rank = dist.get_rank()
        core = load_model(f"{folder}/modernbert", document_length=document_length).double()
        batch = batch_of(core, rank)
        if checkpointing:
            core[0].auto_model.gradient_checkpointing_enable({"use_reentrant": False})
        model = DistributedDataParallel(core) if wrapped else core
        loss_function = loss_class(model, **options)

        step = partial(loss_and_gradients, core, loss_function, batch)
        stock = step()
        if packed:
            encoding_attention.variable_length_attention = attend_to_own_document
        calls = []
        with pylate_fastmaxsim.enabled(stock_masking=True):
            step()
            core[0].register_forward_pre_hook(looking(lambda _module, args: calls.append(args[0]["input_ids"].numel())))
            ours = step()
            assert set(modes.chosen[core].values()) == {"packed" if packed else "grouped"}
            if packed and loss_class is losses.Contrastive:
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
