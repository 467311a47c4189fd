"""Wrappers of a trainer around a model, and the model inside."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from pylate_fastmaxsim.integrations.patching.known_sources import defined_in


class StandIn(nn.Module):
    """Substitute for a model while a loss runs: ``answer`` returns for each call what the model would.

    It has the attributes of the model, which is not a part of it.
    """

    def __init__(self, model: nn.Module, answer: Callable) -> None:
        super().__init__()
        self.__dict__["stands_for"] = model
        self._answer = answer

    def forward(self, *args, **kwargs):
        return self._answer(*args, **kwargs)

    def __getattr__(self, name: str) -> object:
        return getattr(self.__dict__["stands_for"], name)


def layers_of_wrapping(model: nn.Module) -> list[nn.Module]:
    """The wrappers around a model, outermost first, and the model.

    Wrappers are DistributedDataParallel, DataParallel, DeepSpeed, PEFT and ``torch.compile``.
    FullyShardedDataParallel counts as the model: what it wraps has no whole parameters to run with.

    Examples
    --------
    >>> model = nn.Linear(1, 1)
    >>> layers_of_wrapping(nn.DataParallel(model))[-1] is model
    True
    """
    layers = [model.stands_for if isinstance(model, StandIn) else model]
    while not isinstance(layers[-1], FullyShardedDataParallel):
        layer = layers[-1]
        inner = getattr(layer, "_orig_mod", None) or getattr(layer, "module", None)
        if inner is None and hasattr(layer, "peft_config") and hasattr(layer, "get_base_model"):
            inner = layer.get_base_model()
        if not isinstance(inner, nn.Module):
            break
        layers.append(inner)
    return layers


def unwrap(model: nn.Module) -> nn.Module:
    """The innermost of :func:`layers_of_wrapping`."""
    return layers_of_wrapping(model)[-1]


def wrapper_attribute(model: nn.Module, name: str) -> object:
    """An attribute of a PyLate model, from the outermost wrapper that has it, as PyLate's losses read it."""
    layers = layers_of_wrapping(model)
    return getattr(next((layer for layer in layers if hasattr(layer, name)), layers[-1]), name)


def unsharded(module: nn.Module) -> nn.Module:
    """The module inside FullyShardedDataParallel, or the module itself."""
    return module.module if isinstance(module, FullyShardedDataParallel) else module


def sharded_by_fsdp(model: nn.Module) -> bool:
    """Check whether FSDP divides the weights of a module in a model."""
    return any(isinstance(module, (FullyShardedDataParallel, FSDPModule)) for module in model.modules())


def sharded_by_deepspeed(module: nn.Module) -> bool:
    """Check whether each rank holds a part of a module's weights (ZeRO 3), which hooks gather while the module runs."""
    # To look at all weights takes a millisecond.
    return "deepspeed" in sys.modules and any(hasattr(weight, "ds_id") for weight in module.parameters())


def is_data_parallel_copy(module: nn.Module) -> bool:
    """Check whether DataParallel made a module for one step."""
    return getattr(module, "_is_replica", False)


def is_compiled(model: nn.Module) -> bool:
    """Check whether ``torch.compile(model)`` or ``model.compile()`` was called for the whole model."""
    return any(
        hasattr(layer, "_orig_mod") or layer._compiled_call_impl is not None for layer in layers_of_wrapping(model)
    )


def group_in_step(model: nn.Module, backwards: bool = False) -> dist.ProcessGroup | None:
    """Ranks that must call a model equally often, because each call waits for all of them; else ``None``.

    ``backwards``: each call has a backward of its own, which may wait as well.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None
    *around, core = layers_of_wrapping(model)
    waiting = (layer for layer in around if _waits_for_ranks(layer, backwards))
    group = next((getattr(layer, "process_group", dist.group.WORLD) for layer in waiting), None)
    # Perhaps only the encoder is sharded, and with copies in other groups.
    if sharded_by_fsdp(core):
        group = dist.group.WORLD
    return group if group is not None and dist.get_world_size(group) > 1 else None


def no_grad_sync(model: nn.Module) -> AbstractContextManager:
    """Context in which a backward does not exchange gradients; the next one outside sends them too.

    Only under DistributedDataParallel. FSDP would have to hold whole gradients, a static graph needs the exchange of
    its first backward, and a compiled model would be compiled twice.
    """
    if isinstance(model, DistributedDataParallel) and not model.static_graph:
        return model.no_sync()
    return nullcontext()


def _waits_for_ranks(layer: nn.Module, backwards: bool) -> bool:
    if isinstance(layer, DistributedDataParallel):
        # One backward of many calls exchanges gradients once. Buffers are broadcast in every call that will exchange
        # gradients; the Sentence Transformers trainer switches that off.
        broadcasts = layer.require_backward_grad_sync and layer.broadcast_buffers and len(layer.modules_buffers) > 0
        return torch.is_grad_enabled() and (backwards or broadcasts)
    return defined_in(type(layer).forward, ("deepspeed",))


def calls_of_all_ranks(calls: int, device: torch.device, group: dist.ProcessGroup, texts: int) -> int:
    """The largest number of mini-batches that a rank would make, of its number of texts. Waits for the device.

    Raises ValueError on all ranks if one of them has fewer texts than mini-batches.
    """
    most, fewest = _most_of_all_ranks([calls, -texts], device, group)
    if most > -fewest:
        raise ValueError(
            f"One process divides its batch into {most} mini-batches, and another has only {-fewest} texts to divide. "
            "All must make equally many: train with dataloader_drop_last=True, or raise mini_batch_size."
        )
    return most


def least_of_all_ranks(count: int, device: torch.device, group: dist.ProcessGroup) -> int:
    """The smallest number of a rank. Waits for the device."""
    return -_most_of_all_ranks([-count], device, group)[0]


def _most_of_all_ranks(numbers: list[int], device: torch.device, group: dist.ProcessGroup) -> list[int]:
    reduced = torch.tensor(numbers, device=device)
    dist.all_reduce(reduced, dist.ReduceOp.MAX, group)
    return reduced.tolist()
