"""GradCache of Sentence Transformers: mini-batches that fill a packed encoder, and two passes over them that are alike.

A mini-batch of few short texts keeps the host busier than a GPU. Where the encoder was packed in the step before, a
mini-batch takes as many texts as hold no more tokens than ``mini_batch_size`` texts of the widest column with padding:
what stock encodes at once, and what it needs memory for.

The second pass runs inside ``backward()``, which a training loop calls outside of its autocast context. Stock makes it
in float32 there, and the gradients that wait are of other embeddings. Here dropout would be of another draw as well: in
float32 texts are encoded another way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from numbers import Integral
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from sentence_transformers.base.losses import gradcache
from sentence_transformers.multi_vector_encoder.losses import CachedMultiVectorMultipleNegativesRankingLoss
from torch import Tensor, nn

from pylate_fastmaxsim.integrations import switch
from pylate_fastmaxsim.integrations.decisions import least_of_all_ranks
from pylate_fastmaxsim.integrations.documents import has_gaps
from pylate_fastmaxsim.integrations.grouping import fill_in_order, split_until
from pylate_fastmaxsim.integrations.patching import Patch
from pylate_fastmaxsim.integrations.redirection import detached
from pylate_fastmaxsim.integrations.wrappers import group_in_step, layers_of_wrapping

Features = dict[str, Tensor]
Ranges = list[tuple[int, int]]
Value = TypeVar("Value")


@dataclass
class _Step:
    """What a loss encodes in its forward: how many tokens at once, if so many are to fill a call, and what came of it.

    ``calls`` are all of the first pass, ``packed`` those that left padding out in one row.
    """

    tokens: int | None
    group: dist.ProcessGroup | None
    calls: int = 0
    packed: int = 0


@dataclass
class _First:
    """What the second pass over some texts is to have in common with the first."""

    autocast: dict[str, object]
    modes: list[str] = field(default_factory=list)


_step: ContextVar[_Step | None] = ContextVar("step", default=None)

# Notes a mode in the first pass, and says which it was in the second.
_modes: ContextVar[list[str] | Iterator[str] | None] = ContextVar("modes", default=None)

# By the random numbers that the second pass is to draw again.
_firsts: WeakKeyDictionary[object, _First] = WeakKeyDictionary()

# Of each loss, whether all calls were packed in its last step.
_were_packed: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def patches() -> list[Patch]:
    """What to replace in Sentence Transformers."""
    return [
        Patch(CachedMultiVectorMultipleNegativesRankingLoss, "forward", forward),
        Patch(CachedMultiVectorMultipleNegativesRankingLoss, "embed_minibatch", embed_minibatch),
        Patch(gradcache, "_minibatch_ranges", mini_batches),
    ]


def as_before(decide: Callable[[], str]) -> str:
    """How to encode texts: as in the first pass over them, or as ``decide`` finds."""
    modes = _modes.get()
    if isinstance(modes, Iterator):
        return next(modes, None) or decide()
    mode = decide()
    if modes is not None:
        modes.append(mode)
    return mode


def note_packed() -> None:
    """That the texts of a call were encoded without padding in one row."""
    if (step := _step.get()) is not None:
        step.packed += 1


_stock_forward = detached(CachedMultiVectorMultipleNegativesRankingLoss.forward)


@wraps(_stock_forward)
def forward(self: nn.Module, sentence_features: Iterable[Features], *args, **kwargs) -> Tensor:
    options = switch.options()
    if options is None or torch.compiler.is_compiling() or not (self.model.training and torch.is_grad_enabled()):
        return _stock_forward(self, sentence_features, *args, **kwargs)
    columns = list(sentence_features)
    group = group_in_step(self.model, backwards=True)
    step = _Step(_tokens_at_once(self, columns, group), group)
    with _setting(_step, step):
        loss = _stock_forward(self, columns, *args, **kwargs)
    _were_packed[self] = bool(options.padding_free) and 0 < step.calls == step.packed
    return loss


def _tokens_at_once(loss: nn.Module, columns: Sequence[Features], group: dist.ProcessGroup | None) -> int | None:
    """Tokens that fill a call of the encoder; None where mini-batches are to be those of stock."""
    fills = _were_packed.get(loss, False) and isinstance(loss.mini_batch_size, Integral) and loss.mini_batch_size > 0
    # Counts the calls of a step, once and for all.
    fills = fills and not any(getattr(layer, "static_graph", False) for layer in layers_of_wrapping(loss.model))
    masks = [column["attention_mask"] for column in columns if "attention_mask" in column]
    fills = fills and bool(masks) and len(masks) == len(columns)
    if group:
        device = next(value for value in columns[0].values() if isinstance(value, Tensor)).device
        fills = bool(least_of_all_ranks(int(fills), device, group))
    return loss.mini_batch_size * max(mask.shape[1] for mask in masks) if fills else None


_stock_ranges = detached(gradcache._minibatch_ranges)


@wraps(_stock_ranges)
def mini_batches(sentence_feature: Features, mini_batch_size: int, mini_batch_num_tokens: int | None = None) -> Ranges:
    """Which texts of a column are encoded together: from the first of each mini-batch to the one behind its last."""
    step = _step.get()
    if step is None or step.tokens is None or mini_batch_num_tokens is not None:
        return _stock_ranges(sentence_feature, mini_batch_size, mini_batch_num_tokens)
    mask = sentence_feature["attention_mask"]
    if has_gaps(mask):
        # These are padded, and more of them would need more memory.
        parts = [list(range(*ends)) for ends in _stock_ranges(sentence_feature, mini_batch_size)]
    else:
        parts = fill_in_order(mask.sum(dim=1).tolist(), step.tokens)
    if step.group:
        # Buffers, or the weights of a sharded model, are sent in every call. Others may have more or fewer texts.
        calls = -least_of_all_ranks(-len(parts), mask.device, step.group)
        if calls > least_of_all_ranks(len(mask), mask.device, step.group):
            return _stock_ranges(sentence_feature, mini_batch_size)
        parts = split_until(parts, calls)
    return [(part[0], part[-1] + 1) for part in parts]


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
    if (step := _step.get()) is not None:
        step.calls += 1
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
