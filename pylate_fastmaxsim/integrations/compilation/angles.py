"""Rotary angles of ModernBERT, computed once a forward: transformers asks for them again for every layer."""

from __future__ import annotations

from weakref import WeakSet, ref

import torch
from torch import Tensor, nn

from pylate_fastmaxsim.integrations.models.user_code import has_hooks

try:
    from transformers.models.modernbert.modeling_modernbert import ModernBertRotaryEmbedding
except ImportError:  # an older transformers, without ModernBERT
    ModernBertRotaryEmbedding = None

_installed: WeakSet[nn.Module] = WeakSet()


def install(model: nn.Module) -> None:
    """Have each ModernBERT of a model compute the angles of its two kinds of layers once a forward."""
    for module in model.modules():
        if type(module) is ModernBertRotaryEmbedding and module._compiled_call_impl is None:
            module._compiled_call_impl = AnglesOfForward(module)
            _installed.add(module)


def release() -> None:
    """Undo :func:`install`."""
    for module in _installed:
        if isinstance(module._compiled_call_impl, AnglesOfForward):
            module._compiled_call_impl = None
    _installed.clear()


class AnglesOfForward:
    """In the place of a call of rotary embeddings: the same inputs, which every forward makes anew, have one result."""

    def __init__(self, embedding: nn.Module) -> None:
        self._embedding = embedding
        self._inputs: tuple[ref, ref] | None = None
        self._angles: dict[str | None, tuple[Tensor, Tensor]] = {}

    def __call__(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        if torch.compiler.is_compiling() or has_hooks(self._embedding):
            return self._embedding._call_impl(x, position_ids, layer_type)
        given = x, position_ids
        if self._inputs is None or any(kept() is not each for kept, each in zip(self._inputs, given, strict=True)):
            # Angles are not kept longer than the states that they are for.
            angles = self._angles = {}
            self._inputs = ref(x, lambda _: angles.clear()), ref(position_ids)
        if layer_type not in self._angles:
            self._angles[layer_type] = self._embedding._call_impl(x, position_ids, layer_type)
        return self._angles[layer_type]
