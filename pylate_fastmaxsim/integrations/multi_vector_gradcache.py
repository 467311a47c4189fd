"""The two passes of Sentence Transformers' GradCache, alike: in the same precision, encoded the same way.

The second pass runs inside ``backward()``, which a training loop calls outside of its autocast context. Stock makes it
in float32 there, and the gradients that wait are of other embeddings. Here dropout would be of another draw as well: in
float32 texts are encoded another way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
from sentence_transformers.multi_vector_encoder.losses import CachedMultiVectorMultipleNegativesRankingLoss
from torch import Tensor, nn

from pylate_fastmaxsim.integrations import attention, switch
from pylate_fastmaxsim.integrations.patching import Patch
from pylate_fastmaxsim.integrations.redirection import detached

Features = dict[str, Tensor]
Value = TypeVar("Value")


@dataclass
class _First:
    """What the second pass over some texts is to have in common with the first."""

    autocast: dict[str, object]
    modes: list[str] = field(default_factory=list)


# Notes a mode in the first pass, and says which it was in the second.
_modes: ContextVar[list[str] | Iterator[str] | None] = ContextVar("modes", default=None)

# By the random numbers that the second pass is to draw again.
_firsts: WeakKeyDictionary[object, _First] = WeakKeyDictionary()


def patches() -> list[Patch]:
    """What to replace in Sentence Transformers."""
    return [Patch(CachedMultiVectorMultipleNegativesRankingLoss, "embed_minibatch", embed_minibatch)]


def as_before(decide: Callable[[], str]) -> str:
    """How to encode texts: as in the first pass over them, or as ``decide`` finds."""
    modes = _modes.get()
    if isinstance(modes, Iterator):
        before = next(modes, None)
        if before is None:
            return decide()
        if before == "packed" and not attention.any_prepared():
            # Options changed between the passes, which puts encoders back. To decide prepares them again.
            return decide()
        return before
    mode = decide()
    if modes is not None:
        modes.append(mode)
    return mode


def inside() -> bool:
    """Whether a mini-batch is encoded, which is to have a backward of its own."""
    return _modes.get() is not None


_stock_embed = detached(CachedMultiVectorMultipleNegativesRankingLoss.embed_minibatch)
_parameters = inspect.signature(_stock_embed)


@wraps(_stock_embed)
def embed_minibatch(self: nn.Module, *args, **kwargs) -> tuple:
    given = _parameters.bind(self, *args, **kwargs).arguments
    state = given.get("random_state")
    if state is not None and state in _firsts:
        first = _firsts[state]
        with _setting(_modes, iter(first.modes)), torch.autocast(**first.autocast):
            return _stock_embed(self, *args, **kwargs)
    if state is not None or switch.options() is None:
        return _stock_embed(self, *args, **kwargs)
    first = _First(_autocast_of(given["sentence_feature"]))
    with _setting(_modes, first.modes):
        *embedded, state = _stock_embed(self, *args, **kwargs)
    if state is not None:
        _firsts[state] = first
    return *embedded, state


@contextmanager
def _setting(variable: ContextVar[Value], value: Value) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def _autocast_of(features: Features) -> dict[str, object]:
    device = next(values for values in features.values() if isinstance(values, Tensor)).device.type
    return {
        "device_type": device,
        "dtype": torch.get_autocast_dtype(device),
        "enabled": torch.is_autocast_enabled(device),
        # Up to PyTorch 2.10 a backward inside of autocast would be given the weights that the first pass has cast.
        "cache_enabled": False,
    }
