"""The fused head in two real processes: the weight of the Dense module is sharded, and its gradient arrives."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import MethodType
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import convert_outputs_to_fp32
from pylate import losses
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.encoding import attention as encoding_attention
from pylate_fastmaxsim.integrations.encoding import modes
from pylate_fastmaxsim.integrations.models.wrappers import unwrap
from pylate_fastmaxsim.integrations.pylate import fused_head
from pylate_fastmaxsim.integrations.pylate import losses as pylate_losses
from tests.support.compared import assert_equal
from tests.support.models import attend_to_own_document, features, load_model, sentences
from tests.support.rank_steps import batch_of
from tests.support.sharding import data_parallel, flat_sharded, fully_sharded

RANKS = 2


def _gradients(model) -> dict[str, torch.Tensor]:
    """Of all parameters, by their names in the model, whole on every rank."""
    whole = nullcontext()
    if isinstance(model, FullyShardedDataParallel):
        whole = FullyShardedDataParallel.summon_full_params(model, with_grads=True)
    with whole:
        gradients = {name: weight.grad for name, weight in model.named_parameters()}
        return {
            name: gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone()
            for name, gradient in gradients.items()
        }


def _compare(
    wrap: Callable, loss_class, checkpointing: bool = False, packed: bool = False, **options
) -> Callable[[str], None]:
    def run(folder: str) -> None:
        core = load_model(f"{folder}/modernbert", bias=True).double()
        batch = batch_of(core, dist.get_rank())
        if checkpointing:
            core[0].auto_model.gradient_checkpointing_enable({"use_reentrant": False})
        if packed:
            encoding_attention.variable_length_attention = attend_to_own_document
        wrapped = wrap(core)
        projected = []
        originals = fused_head.project_normalize, fused_head.log_once

        def recording(*args):
            projected.append(args[1].shape)
            return originals[0](*args)

        def refusing(message, *values):
            raise AssertionError(message % values)

        def step(model):
            model.zero_grad()
            loss = loss_class(model, **options)([dict(column) for column in batch])
            loss.backward()
            return loss.item(), _gradients(model)

        stock = step(wrapped)
        fused_head.project_normalize, fused_head.log_once = recording, refusing
        try:
            with pylate_fastmaxsim.enabled(stock_masking=True):
                step(wrapped)
                ours = step(wrapped)
                assert set(modes.chosen[unwrap(wrapped)].values()) == {"packed" if packed else "grouped"}
                if packed and loss_class is losses.Contrastive:
                    assert set(modes.joined[unwrap(wrapped)].values()) == {True}
        finally:
            fused_head.project_normalize, fused_head.log_once = originals
        assert set(projected) == {(16, 32)}
        assert_equal(ours, stock)

    return run


def _hook_on_one_rank(loss_class, **options) -> Callable[[str], None]:
    """Under mixed precision a rank without a fused head has float32 embeddings, and all score in that then."""

    def run(folder: str) -> None:
        core = load_model(f"{folder}/modernbert")
        batch = features(core, *(sentences(6, longest=8, seed=10 * column + dist.get_rank()) for column in range(3)))
        # As accelerate does.
        forward = torch.autocast("cpu", torch.bfloat16)(core.forward.__func__)
        core.forward = MethodType(forward, core)
        core.forward = MethodType(convert_outputs_to_fp32(core.forward.__func__), core)
        if dist.get_rank() == 0:
            core.register_forward_hook(lambda *_args: None)
        loss_function = loss_class(data_parallel(core, broadcast_buffers=False), gather_across_devices=True, **options)

        def step():
            core.zero_grad()
            loss = loss_function([dict(column) for column in batch])
            loss.backward()
            return loss.item(), _gradients(core)

        stock = step()
        said = []
        with (
            pylate_fastmaxsim.enabled(stock_masking=True),
            mock.patch.object(pylate_losses, "log_once", lambda message, *values: said.append(message % values)),
        ):
            ours = step()
        named = "Documents are scored in torch.float32, the dtype that they have in another process."
        assert said == ([] if dist.get_rank() == 0 else [named])
        assert_equal(ours, stock, 0.1)

    return run


CASES = {
    "ddp": _compare(lambda m: data_parallel(m, find_unused_parameters=True), losses.Contrastive),
    "ddp cached": _compare(data_parallel, losses.CachedContrastive, mini_batch_size=2),
    "fsdp2 checkpointing": _compare(fully_sharded, losses.Contrastive, checkpointing=True),
    "fsdp2 cached": _compare(fully_sharded, losses.CachedContrastive, mini_batch_size=2),
    "fsdp2 packed": _compare(fully_sharded, losses.Contrastive, packed=True, gather_across_devices=True),
    "fsdp2 packed cached": _compare(fully_sharded, losses.CachedContrastive, packed=True, mini_batch_size=2),
    "fsdp1": _compare(flat_sharded, losses.Contrastive),
    "fsdp1 packed": _compare(flat_sharded, losses.Contrastive, packed=True),
    "hook on one rank": _hook_on_one_rank(losses.Contrastive),
    "hook on one rank cached": _hook_on_one_rank(losses.CachedContrastive, mini_batch_size=2),
}


@pytest.mark.process
@pytest.mark.parametrize("case", CASES)
def test_two_processes(outcomes, case):
    for rank, outcome in enumerate(outcomes(case)):
        assert outcome == "passed", f"rank {rank}: {outcome}"
