"""The PyLate model inside what a trainer wraps around it."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DataParallel


def layers_of_wrapping(model: nn.Module) -> list[nn.Module]:
    """A model and what DistributedDataParallel, DataParallel, DeepSpeed and ``torch.compile`` wrapped, outermost first.

    FullyShardedDataParallel counts as innermost: what it wraps has no whole parameters to run with.

    Examples
    --------
    >>> model = nn.Linear(1, 1)
    >>> layers_of_wrapping(nn.DataParallel(model))[-1] is model
    True
    """
    layers = [model]
    while not isinstance(layers[-1], FullyShardedDataParallel):
        inner = getattr(layers[-1], "_orig_mod", None) or getattr(layers[-1], "module", None)
        if not isinstance(inner, nn.Module):
            break
        layers.append(inner)
    return layers


def unwrap(model: nn.Module) -> nn.Module:
    """The innermost of :func:`layers_of_wrapping`."""
    return layers_of_wrapping(model)[-1]


def is_compiled(model: nn.Module) -> bool:
    """Whether ``torch.compile(model)`` or ``model.compile()`` is in force for a model as a whole."""
    return any(
        hasattr(layer, "_orig_mod") or layer._compiled_call_impl is not None for layer in layers_of_wrapping(model)
    )


def runs_in_step(model: nn.Module) -> bool:
    """Whether all ranks of a distributed run must call a model equally often, because a call or its backward waits for all."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return False
    *around, core = layers_of_wrapping(model)
    return isinstance(core, (FullyShardedDataParallel, FSDPModule)) or any(
        not hasattr(layer, "_orig_mod") and not isinstance(layer, DataParallel) for layer in around
    )
