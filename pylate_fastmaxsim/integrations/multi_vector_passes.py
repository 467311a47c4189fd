"""Both passes of GradCache alike, as Sentence Transformers makes them: in the same precision, encoded the same way.

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
from weakref import WeakKeyDictionary

import torch
from sentence_transformers.multi_vector_encoder.losses import CachedMultiVectorMultipleNegativesRankingLoss
from torch import Tensor, nn

from pylate_fastmaxsim.integrations import switch
from pylate_fastmaxsim.integrations.patching import Patch
from pylate_fastmaxsim.integrations.redirection import detached


@dataclass
class _First:
    """What the second pass over some texts is to have in common with the first."""

    autocast: dict[str, object]
    modes: list[str] = field(default_factory=list)


# By the random numbers that the second pass is to draw again.
_firsts: WeakKeyDictionary[object, _First] = WeakKeyDictionary()

# Notes a mode in the first pass, and says which it was in the second.
_modes: ContextVar[list[str] | Iterator[str] | None] = ContextVar("modes", default=None)


def as_before(decide: Callable[[], str]) -> str:
    """How to encode texts: as in the first pass over them, or as ``decide`` finds."""
    modes = _modes.get()
    if isinstance(modes, Iterator):
        return next(modes, None) or decide()
    mode = decide()
    if modes is not None:
        modes.append(mode)
    return mode


_stock = detached(CachedMultiVectorMultipleNegativesRankingLoss.embed_minibatch)
_parameters = inspect.signature(_stock)


@wraps(_stock)
def embed_minibatch(self: nn.Module, *args, **kwargs) -> tuple:
    """Token embeddings, mask and random state of some texts of a column."""
    given = _parameters.bind(self, *args, **kwargs).arguments
    state = given.get("random_state")
    if state is not None and state in _firsts:
        first = _firsts[state]
        with _with_modes(iter(first.modes)), torch.autocast(**first.autocast):
            return _stock(self, *args, **kwargs)
    if state is not None or switch.options() is None:
        return _stock(self, *args, **kwargs)
    first = _First(_autocast_of(given["sentence_feature"]))
    with _with_modes(first.modes):
        *embedded, state = _stock(self, *args, **kwargs)
    if state is not None:
        _firsts[state] = first
    return *embedded, state


@contextmanager
def _with_modes(modes: list[str] | Iterator[str]) -> Iterator[None]:
    token = _modes.set(modes)
    try:
        yield
    finally:
        _modes.reset(token)


def _autocast_of(features: dict[str, Tensor]) -> dict[str, object]:
    device = next(values for values in features.values() if isinstance(values, Tensor)).device.type
    return {
        "device_type": device,
        "dtype": torch.get_autocast_dtype(device),
        "enabled": torch.is_autocast_enabled(device),
        # Up to PyTorch 2.10 a backward inside of autocast would be given the weights that the first pass has cast.
        "cache_enabled": False,
    }


def patches() -> list[Patch]:
    """What to replace in Sentence Transformers."""
    return [Patch(CachedMultiVectorMultipleNegativesRankingLoss, "embed_minibatch", embed_minibatch)]
