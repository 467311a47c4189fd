"""What a module keeps in plain attributes between calls: counters, lists, tensors that are no buffers."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# What PyTorch itself keeps in a module.
_OF_PYTORCH = frozenset(vars(nn.Module()))

_MAPPINGS = (dict, defaultdict, OrderedDict, Counter)
_CONTAINERS = (list, set, deque, *_MAPPINGS)
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

    What containers hold in containers counts as well.

    >>> module.seen = {"losses": [torch.zeros(2)]}
    >>> before = Attributes(module)
    >>> _ = module.seen["losses"][0].add_(1)
    >>> before.changed()
    True
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.values = _of(module)
        seen: set[int] = set()
        self.copies = {name: _copied(value, seen) for name, value in self.values.items()}

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
            _restore(value, self.copies[name])


@dataclass(frozen=True)
class _Contents:
    """What a container held, and a copy of each of that."""

    keys: list | None
    values: list
    copies: list


def _of(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _OF_PYTORCH}


def _copied(value: Any, seen: set[int]) -> Any:
    """A copy to compare with later. Containers that were ``seen`` already count where they were first met."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, torch.Generator):
        return value.get_state()
    if type(value) in _CONTAINERS and id(value) not in seen:
        seen.add(id(value))
        keys, values = _contents(value)
        return _Contents(keys, values, [_copied(each, seen) for each in values])
    return value


def _contents(container: Any) -> tuple[list | None, list]:
    """Keys, of a mapping, and values."""
    if type(container) in _MAPPINGS:
        return list(container), list(container.values())
    return None, list(container)


def _holds_the_same(now: Any, before: _Contents) -> bool:
    """Whether a container holds what it held, whatever became of that."""
    if isinstance(now, set):
        return now == set(before.values)
    keys, values = _contents(now)
    return keys == before.keys and len(values) == len(before.values) and all(map(_are_one, values, before.values))


def _same(now: Any, before: Any) -> bool:
    if isinstance(now, torch.Generator):  # random numbers that were drawn are no statistics
        return True
    if isinstance(before, _Contents):
        return (
            type(now) in _CONTAINERS and _holds_the_same(now, before) and all(map(_same, before.values, before.copies))
        )
    if isinstance(now, Tensor) and isinstance(before, Tensor):
        return now.shape == before.shape and now.dtype == before.dtype and torch.equal(now, before)
    if isinstance(now, np.ndarray) and isinstance(before, np.ndarray):
        return now.shape == before.shape and now.dtype == before.dtype and now.tobytes() == before.tobytes()
    return _are_one(now, before)


def _are_one(now: Any, before: Any) -> bool:
    return now is before or (type(now) is type(before) and type(now) in _NUMBERS and now == before)


def _restore(value: Any, copy: Any) -> None:
    """Make what an attribute held what it was."""
    if isinstance(value, torch.Generator):
        value.set_state(copy)
    elif isinstance(copy, _Contents):
        if not _holds_the_same(value, copy):
            value.clear()
            if copy.keys is None:
                (value.update if isinstance(value, set) else value.extend)(copy.values)
            else:
                # Not update(), which in a Counter counts what it is given.
                for key, each in zip(copy.keys, copy.values, strict=True):
                    value[key] = each
        for each, of_each in zip(copy.values, copy.copies, strict=True):
            _restore(each, of_each)
    elif isinstance(value, Tensor):
        if not _same(value, copy):
            value.copy_(copy)
    elif isinstance(value, np.ndarray) and not _same(value, copy):
        value[...] = copy
