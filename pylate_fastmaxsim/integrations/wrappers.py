"""The PyLate model inside what a trainer wraps around it."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel


def layers_of_wrapping(model: nn.Module) -> list[nn.Module]:
    """A model and what DistributedDataParallel, DataParallel and ``torch.compile`` wrapped, outermost first.

    FullyShardedDataParallel counts as innermost: what it wraps has no whole parameters to run with.

    Examples
    --------
    >>> model = nn.Linear(1, 1)
    >>> layers_of_wrapping(nn.DataParallel(model))[-1] is model
    True
    """
    layers = [model]
    while True:
        if isinstance(layers[-1], (DistributedDataParallel, DataParallel)):
            layers.append(layers[-1].module)
        elif hasattr(layers[-1], "_orig_mod"):
            layers.append(layers[-1]._orig_mod)
        else:
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
    """Whether the ranks of a distributed run must call a model equally often, because each call or its backward waits for all."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return False
    parallel = (DistributedDataParallel, FullyShardedDataParallel, FSDPModule)
    return any(isinstance(layer, parallel) for layer in layers_of_wrapping(model))
