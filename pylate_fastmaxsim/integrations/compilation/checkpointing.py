"""Gradient checkpointing inside what is compiled of a layer: the backward does not run the layer from Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.checkpoint import checkpoint

from pylate_fastmaxsim.integrations.models.user_code import has_hooks
from pylate_fastmaxsim.integrations.patching.patches import Patch, PatchSet

try:
    from transformers.modeling_layers import GradientCheckpointingLayer
except ImportError:  # an older transformers, where each encoder checkpoints in its own code
    GradientCheckpointingLayer = None

# Options of checkpoint() that mean the same when it is traced; another, as a context_fn, is somebody's own.
_TRACED_ALIKE = {"use_reentrant", "preserve_rng_state"}

_patches = PatchSet()

# Of each layer, the modules that it had, by id, and where the probabilities of its dropout stand: attributes, and whose
# they are, which may be the layer.
_dropouts: WeakKeyDictionary[nn.Module, tuple[list[int], list[tuple[ref, str]]]] = WeakKeyDictionary()


def include(layers: Iterable[nn.Module]) -> None:
    """Let compiled layers that transformers checkpoints be compiled together with their checkpointing.

    Otherwise transformers calls ``checkpoint`` on the compiled layer, which then is one more call of compiled code in
    the backward, with hooks on every tensor that it keeps: small batches wait for the host. Layers with dropout, with
    hooks or with another checkpointing function are left to transformers.

    Examples
    --------
    >>> include([nn.Linear(2, 2)])  # not checkpointed by transformers: as before
    >>> release()
    """
    if GradientCheckpointingLayer is None:
        return
    prepare()
    for layer in layers:
        known, probabilities = _dropouts.get(layer, (None, []))
        if known is None or getattr(layer, "gradient_checkpointing", False):
            modules = list(map(id, layer.modules()))
            _dropouts[layer] = modules, probabilities if modules == known else list(_probabilities(layer))


def prepare() -> None:
    """Before the first call of a model whose layers will be compiled: the backward runs a layer as the forward did."""
    if GradientCheckpointingLayer is not None and not _patches.targets:
        call = _including(GradientCheckpointingLayer.__call__)
        _patches.apply([Patch(GradientCheckpointingLayer, "__call__", call)])


def release() -> None:
    """Let transformers call ``checkpoint`` again."""
    _patches.undo()
    _dropouts.clear()


def _including(stock: Callable) -> Callable:
    compiled = torch.compile(stock, dynamic=True)

    def call(self: nn.Module, *args, **kwargs):
        if torch.compiler.is_compiling() or not (self.training and self.gradient_checkpointing):
            return stock(self, *args, **kwargs)
        if _can_be_traced(self):
            return compiled(self, *args, **kwargs)
        function = self._gradient_checkpointing_func
        self._gradient_checkpointing_func = partial(_checkpoint_alike, function, self)
        try:
            return stock(self, *args, **kwargs)
        finally:
            self._gradient_checkpointing_func = function

    return call


def _checkpoint_alike(function: Callable, layer: nn.Module, run: Callable, *args):
    """Checkpoint a layer that may be compiled, or not any more, by the time the backward runs it again."""
    of_forward = layer._compiled_call_impl

    def run_alike(*args):
        now, layer._compiled_call_impl = layer._compiled_call_impl, of_forward
        try:
            return run(*args)
        finally:
            layer._compiled_call_impl = now

    return function(run_alike, *args)


def _can_be_traced(layer: nn.Module) -> bool:
    if layer not in _dropouts or layer._compiled_call_impl is None:
        return False
    if has_hooks(layer):
        # As those with which FSDP 2 gathers and frees weights: they run in forward and again in backward, by
        # themselves.
        return False
    if any(owner() is None or getattr(owner(), name) for owner, name in _dropouts[layer][1]):
        # In a checkpoint that is traced Inductor was seen to leave out dropout of attention (PyTorch 2.11, on a CPU).
        return False
    function = layer._gradient_checkpointing_func
    return isinstance(function, partial) and function.func is checkpoint and function.keywords.keys() <= _TRACED_ALIKE


def _probabilities(layer: nn.Module) -> Iterable[tuple[ref, str]]:
    modules = list(layer.modules())
    # By identity, once each: all modules of an encoder have one config.
    owners = {id(owner): owner for owner in [*modules, *(getattr(module, "config", None) for module in modules)]}
    for owner in owners.values():
        for name, value in getattr(owner, "__dict__", {}).items():
            is_named = "dropout" in name or (name == "p" and isinstance(owner, _DropoutNd))
            if is_named and isinstance(value, (int, float)):
                yield ref(owner), name
