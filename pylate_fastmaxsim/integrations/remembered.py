"""What a module of somebody's own remembers between calls: parameters that it writes to, counters, lists, tensors."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

# What PyTorch itself keeps in a module.
_OF_PYTORCH = frozenset(vars(nn.Module()))

_CONTAINERS = (list, dict, set, deque)
_NUMBERS = (int, float, str, bytes)


class Remembered:
    """Parameters and attributes of a module, without those in it, at one time.

    Examples
    --------
    >>> module = nn.Identity()
    >>> module.seen = [3]
    >>> before = Remembered(module)
    >>> module.seen.append(4)
    >>> before.changed()
    True
    >>> before.restore()
    >>> module.seen
    [3]
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        # Of weights that FSDP 2 divided, every rank would have to compare its part at the same time.
        weights = [weight for weight in module.parameters(recurse=False) if type(weight) is nn.Parameter]
        self.parameters = [(weight, weight.detach().clone()) for weight in weights]
        self.attributes = {name: value for name, value in vars(module).items() if name not in _OF_PYTORCH}
        self.copies = {name: _copied(value) for name, value in self.attributes.items()}

    def changed(self) -> bool:
        """Whether one is not what it was."""
        now = {name: value for name, value in vars(self.module).items() if name not in _OF_PYTORCH}
        return (
            now.keys() != self.copies.keys()
            or any(not _same(value, self.copies[name]) for name, value in now.items())
            or any(not _same(weight, value) for weight, value in self.parameters)
        )

    def restore(self) -> None:
        """Make each what it was, in place where it is still needed by others."""
        attributes = vars(self.module)
        for name in [name for name in attributes if name not in _OF_PYTORCH]:
            del attributes[name]
        attributes.update(self.attributes)
        for name, value in self.attributes.items():
            copy = self.copies[name]
            if isinstance(value, Tensor):
                _restore(value, copy)
            elif isinstance(value, torch.Generator):
                value.set_state(copy)
            elif type(value) in _CONTAINERS and not _same(value, copy):
                value.clear()
                (value.extend if isinstance(value, (list, deque)) else value.update)(copy)
        for weight, value in self.parameters:
            _restore(weight, value)


def _restore(tensor: Tensor, value: Tensor) -> None:
    # Only where it was written to: a backward that is still to come would see that.
    if not _same(tensor, value):
        tensor.detach().copy_(value)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, torch.Generator):
        return value.get_state()
    return value.copy() if type(value) in _CONTAINERS else value


def _same(now: Any, before: Any) -> bool:
    if isinstance(now, torch.Generator):  # random numbers that were drawn are no statistics
        return True
    if isinstance(now, Tensor) and isinstance(before, Tensor):
        return now.shape == before.shape and now.dtype == before.dtype and torch.equal(now.detach(), before)
    if type(now) is not type(before):
        return False
    if isinstance(now, dict):
        return now.keys() == before.keys() and all(now[key] is before[key] for key in now)
    if isinstance(now, (list, deque)):
        return len(now) == len(before) and all(map(_is, now, before))
    if isinstance(now, (set, *_NUMBERS)):
        return now == before
    return now is before


def _is(one: Any, other: Any) -> bool:
    return one is other
