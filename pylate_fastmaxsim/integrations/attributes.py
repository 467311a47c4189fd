"""What a module keeps in plain attributes between calls: counters, lists, tensors that are no buffers."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

# What PyTorch itself keeps in a module.
_OF_PYTORCH = frozenset(vars(nn.Module()))

_CONTAINERS = (list, dict, set, deque)
_NUMBERS = (int, float, str, bytes)


class Attributes:
    """The attributes of a module, without those of PyTorch, at one time.

    Examples
    --------
    >>> module = nn.Identity()
    >>> module.seen = [3]
    >>> before = Attributes(module)
    >>> module.seen.append(4)
    >>> before.changed()
    True
    >>> before.restore()
    >>> module.seen
    [3]
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.values = _of(module)
        self.copies = {name: _copied(value) for name, value in self.values.items()}

    def changed(self) -> bool:
        """Whether one is not what it was."""
        now = _of(self.module)
        return now.keys() != self.copies.keys() or any(not _same(now[name], self.copies[name]) for name in now)

    def restore(self) -> None:
        """Make each what it was, in place where others may hold it."""
        attributes = vars(self.module)
        for name in _of(self.module):
            del attributes[name]
        attributes.update(self.values)
        for name, value in self.values.items():
            copy = self.copies[name]
            if isinstance(value, torch.Generator):
                value.set_state(copy)
            elif not _same(value, copy):
                if isinstance(value, Tensor):
                    value.copy_(copy)
                else:
                    value.clear()
                    (value.extend if isinstance(value, (list, deque)) else value.update)(copy)


def _of(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _OF_PYTORCH}


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
        return now.shape == before.shape and now.dtype == before.dtype and torch.equal(now, before)
    if type(now) is not type(before):
        return False
    if type(now) is dict:
        return now.keys() == before.keys() and all(now[key] is before[key] for key in now)
    if type(now) in (list, deque):
        return len(now) == len(before) and all(one is other for one, other in zip(now, before, strict=True))
    if type(now) in (set, *_NUMBERS):
        return now == before
    return now is before
