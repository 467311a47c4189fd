"""The PyLate model inside what a trainer wraps around it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from pylate_fastmaxsim.integrations.patching.provenance import defined_in


def layers_of_wrapping(model: nn.Module) -> list[nn.Module]:
    """A model and what is wrapped around it, outermost first.

    That is DistributedDataParallel, DataParallel, DeepSpeed, PEFT and ``torch.compile``. FullyShardedDataParallel
    counts as innermost: what it wraps has no whole parameters to run with.

    Examples
    --------
    >>> model = nn.Linear(1, 1)
    >>> layers_of_wrapping(nn.DataParallel(model))[-1] is model
    True
    """
    layers = [model]
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
    """An attribute of a PyLate model: of the outermost of :func:`layers_of_wrapping` that has it, as in its losses.

    Examples
    --------
    >>> model = nn.Linear(2, 1)
    >>> wrapper = nn.DataParallel(model)
    >>> wrapper_attribute(wrapper, "in_features")
    2
    >>> wrapper.in_features = 3
    >>> wrapper_attribute(wrapper, "in_features")
    3
    """
    layers = layers_of_wrapping(model)
    return getattr(next((layer for layer in layers if hasattr(layer, name)), layers[-1]), name)


def unsharded(module: nn.Module) -> nn.Module:
    """What FullyShardedDataParallel wrapped, or the module itself."""
    return module.module if isinstance(module, FullyShardedDataParallel) else module


def divided_by_deepspeed(module: nn.Module) -> bool:
    """Whether each rank has a part of its weights only (ZeRO 3), which hooks make whole while the module runs."""
    return any(hasattr(weight, "ds_id") for weight in module.parameters())


def is_compiled(model: nn.Module) -> bool:
    """Whether ``torch.compile(model)`` or ``model.compile()`` is in force for a model as a whole."""
    return any(
        hasattr(layer, "_orig_mod") or layer._compiled_call_impl is not None for layer in layers_of_wrapping(model)
    )


def group_in_step(model: nn.Module, backwards: bool = False) -> dist.ProcessGroup | None:
    """The ranks of a distributed run that must call a model equally often, because each call waits for all of them.

    With ``backwards`` also because the backward does that each call is to have. ``None`` where each rank may go its
    way.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None
    *around, core = layers_of_wrapping(model)
    waiting = (layer for layer in around if _waits(layer, backwards))
    group = next((getattr(layer, "process_group", dist.group.WORLD) for layer in waiting), None)
    # Also where no more of a model is sharded than its encoder. Of what is sharded other groups may hold copies.
    if any(isinstance(module, (FullyShardedDataParallel, FSDPModule)) for module in core.modules()):
        group = dist.group.WORLD
    return group if group is not None and dist.get_world_size(group) > 1 else None


def no_grad_sync(model: nn.Module) -> AbstractContextManager:
    """Wherein gradients of weights stay on this rank where they can, to be sent with those of a backward outside.

    They cannot where somebody else sends them or needs each exchange: FSDP would hold whole gradients, a static graph
    counts on its first backward being sent, and what is compiled as a whole would be compiled twice.
    """
    if isinstance(model, DistributedDataParallel) and not model.static_graph:
        return model.no_sync()
    return nullcontext()


def _waits(layer: nn.Module, backwards: bool) -> bool:
    if isinstance(layer, DistributedDataParallel):
        # One backward of many calls exchanges gradients once. The Sentence Transformers trainer broadcasts no buffers,
        # and where no gradients are exchanged they are broadcast in the first of any number of calls.
        broadcasts = layer.require_backward_grad_sync and layer.broadcast_buffers and len(layer.modules_buffers) > 0
        return torch.is_grad_enabled() and (backwards or broadcasts)
    return defined_in(type(layer).forward, ("deepspeed",))
