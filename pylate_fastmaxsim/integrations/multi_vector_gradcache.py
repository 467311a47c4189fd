"""The two passes of Sentence Transformers' GradCache, alike: in the same precision, encoded the same way.

Where ``backward()`` is called outside of autocast, stock makes the second pass in float32, and the gradients that wait are
of other embeddings. Here dropout would be of another draw as well: in float32 texts are encoded another way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from weakref import WeakKeyDictionary

import torch
from sentence_transformers.multi_vector_encoder.losses import CachedMultiVectorMultipleNegativesRankingLoss
from torch import Tensor, nn

from pylate_fastmaxsim.integrations import switch
from pylate_fastmaxsim.integrations.context import setting
from pylate_fastmaxsim.integrations.passes import autocast_in_force
from pylate_fastmaxsim.integrations.patching import Patch
from pylate_fastmaxsim.integrations.redirection import detached


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
        return next(modes, None) or decide()
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
        with setting(_modes, iter(first.modes)), torch.autocast(**first.autocast):
            return _stock_embed(self, *args, **kwargs)
    if state is not None or switch.options() is None:
        return _stock_embed(self, *args, **kwargs)
    tensors = (value for value in given["sentence_feature"].values() if isinstance(value, Tensor))
    first = _First(autocast_in_force(next(tensors).device.type))
    with setting(_modes, first.modes):
        *embedded, state = _stock_embed(self, *args, **kwargs)
    if state is not None:
        _firsts[state] = first
    return *embedded, state
