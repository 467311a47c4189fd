"""What a module keeps in plain attributes between calls: counters, lists, objects, tensors that are no buffers."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pylate_fastmaxsim.integrations.wrappers import HOSTS

# What PyTorch itself keeps in a module.
_OF_PYTORCH = frozenset(vars(nn.Module()))

_MAPPINGS = (dict, defaultdict, OrderedDict, Counter)
_CONTAINERS = (list, set, deque, *_MAPPINGS)
_NUMBERS = (int, float, str, bytes)

# How to read the state of random numbers, and how to put it back.
_RANDOM: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], None]]] = {
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
    random.Random: (random.Random.getstate, random.Random.setstate),
    np.random.RandomState: (np.random.RandomState.get_state, np.random.RandomState.set_state),
    np.random.Generator: (
        lambda generator: generator.bit_generator.state,
        lambda generator, state: setattr(generator.bit_generator, "state", state),
    ),
}

# Whose objects are none that a module keeps something in.
_LIBRARIES = frozenset({*HOSTS, "torch", "transformers_modules"})


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

    What containers hold in containers counts as well, and what objects do of classes that were written with the module's.

    >>> module.seen = {"losses": [torch.zeros(2)]}
    >>> before = Attributes(module)
    >>> _ = module.seen["losses"][0].add_(1)
    >>> before.changed()
    True
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.values = _of(module)
        self._authors = {"__main__", _author(module)} - _LIBRARIES
        seen: set[int] = set()
        self.copies = {name: self._copied(value, seen) for name, value in self.values.items()}

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

    def _copied(self, value: Any, seen: set[int]) -> Any:
        """A copy to compare with later. Containers that were ``seen`` already count where they were first met."""
        if isinstance(value, Tensor):
            return value.detach().clone()
        if isinstance(value, np.ndarray):
            return value.copy()
        if type(value) in _RANDOM:
            return _RANDOM[type(value)][0](value)
        if self._is_container(value) and id(value) not in seen:
            seen.add(id(value))
            keys, values = _contents(value)
            return _Contents(type(value), keys, values, [self._copied(each, seen) for each in values])
        return value

    def _is_container(self, value: Any) -> bool:
        if type(value) in (*_CONTAINERS, SimpleNamespace):
            return True
        is_object = hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type)) and not callable(value)
        return is_object and _author(value) in self._authors


@dataclass(frozen=True)
class _Contents:
    """What a container held, and a copy of each of that."""

    kind: type
    keys: list | None
    values: list
    copies: list


def _of(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _OF_PYTORCH}


def _author(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


def _mapping(container: Any) -> dict | None:
    """The container itself or, of an object, its attributes; None of one without keys."""
    if type(container) in _MAPPINGS:
        return container
    return None if type(container) in _CONTAINERS else vars(container)


def _contents(container: Any) -> tuple[list | None, list]:
    """Keys, where it has some, and values."""
    mapping = _mapping(container)
    return (None, list(container)) if mapping is None else (list(mapping), list(mapping.values()))


def _holds_the_same(now: Any, before: _Contents) -> bool:
    """Whether a container holds what it held, whatever became of that."""
    if isinstance(now, set):
        return now == set(before.values)
    keys, values = _contents(now)
    return keys == before.keys and len(values) == len(before.values) and all(map(_are_one, values, before.values))


def _same(now: Any, before: Any) -> bool:
    if type(now) in _RANDOM:  # random numbers that were drawn are no statistics
        return True
    if isinstance(before, _Contents):
        return (
            type(now) is before.kind and _holds_the_same(now, before) and all(map(_same, before.values, before.copies))
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
    if type(value) in _RANDOM:
        _RANDOM[type(value)][1](value, copy)
    elif isinstance(copy, _Contents):
        if not _holds_the_same(value, copy):
            mapping = _mapping(value)
            (value if mapping is None else mapping).clear()
            if mapping is None:
                (value.update if isinstance(value, set) else value.extend)(copy.values)
            else:
                # Not update(), which in a Counter counts what it is given.
                for key, each in zip(copy.keys, copy.values, strict=True):
                    mapping[key] = each
        for each, of_each in zip(copy.values, copy.copies, strict=True):
            _restore(each, of_each)
    elif isinstance(value, Tensor):
        if not _same(value, copy):
            value.copy_(copy)
    elif isinstance(value, np.ndarray) and not _same(value, copy):
        value[...] = copy
