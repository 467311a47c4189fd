"""Gradient checkpointing compiled together with the layer that it recomputes."""

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

# Options of checkpoint() that mean the same when it is traced; context_fn does not.
_TRACEABLE_OPTIONS = {"use_reentrant", "preserve_rng_state"}

_patches = PatchSet()

# Of each layer, the ids of its modules, and the attributes that hold its dropout probabilities with their owners.
_dropouts: WeakKeyDictionary[nn.Module, tuple[list[int], list[tuple[ref, str]]]] = WeakKeyDictionary()


def compile_checkpointing(layers: Iterable[nn.Module]) -> None:
    """Compile the gradient checkpointing of compiled layers together with them.

    transformers calls ``checkpoint`` on the compiled layer otherwise. That costs hooks on every kept tensor and one more
    call of compiled code in the backward, so that small batches wait for the host. Layers with dropout, with hooks or
    with another checkpointing function are left to transformers.
    """
    if GradientCheckpointingLayer is None:
        return
    patch_checkpointing()
    for layer in layers:
        known, probabilities = _dropouts.get(layer, (None, []))
        if known is None or getattr(layer, "gradient_checkpointing", False):
            modules = list(map(id, layer.modules()))
            _dropouts[layer] = modules, probabilities if modules == known else list(_dropout_probabilities(layer))


def patch_checkpointing() -> None:
    """Have the backward run a layer as its forward did, compiled or not.

    Call it before the first call of a model whose layers will be compiled.
    """
    if GradientCheckpointingLayer is not None and not _patches.targets:
        call = _with_compiled_checkpoint(GradientCheckpointingLayer.__call__)
        _patches.apply([Patch(GradientCheckpointingLayer, "__call__", call)])


def release() -> None:
    """Put the gradient checkpointing of transformers back."""
    _patches.undo()
    _dropouts.clear()


def _with_compiled_checkpoint(stock: Callable) -> Callable:
    compiled = torch.compile(stock, dynamic=True)

    def call(self: nn.Module, *args, **kwargs):
        if torch.compiler.is_compiling() or not (self.training and self.gradient_checkpointing):
            return stock(self, *args, **kwargs)
        if can_be_traced(self):
            return compiled(self, *args, **kwargs)
        function = self._gradient_checkpointing_func
        self._gradient_checkpointing_func = partial(_checkpoint_as_in_forward, function, self)
        try:
            return stock(self, *args, **kwargs)
        finally:
            self._gradient_checkpointing_func = function

    return call


def _checkpoint_as_in_forward(function: Callable, layer: nn.Module, run: Callable, *args):
    """Checkpoint a layer that may be compiled or released between its forward and its backward."""
    in_forward = layer._compiled_call_impl

    def run_as_in_forward(*args):
        now, layer._compiled_call_impl = layer._compiled_call_impl, in_forward
        try:
            return run(*args)
        finally:
            layer._compiled_call_impl = now

    return function(run_as_in_forward, *args)


def checkpointed_layers(model: nn.Module) -> list[nn.Module]:
    """Layers that checkpoint in their own call."""
    of_transformers = GradientCheckpointingLayer or ()
    return [layer for layer in model.modules() if isinstance(layer, of_transformers) and layer.gradient_checkpointing]


def can_be_traced(layer: nn.Module) -> bool:
    """Check whether the checkpointing of a compiled layer is compiled with it."""
    if layer not in _dropouts or layer._compiled_call_impl is None:
        return False
    if has_hooks(layer):
        # Those of FSDP 2, which gather and free weights, must run in the forward and again in the backward.
        return False
    if any(owner() is None or getattr(owner(), name) for owner, name in _dropouts[layer][1]):
        # Inductor was seen to leave attention dropout out of a traced checkpoint (PyTorch 2.11, on a CPU).
        return False
    function = layer._gradient_checkpointing_func
    return (
        isinstance(function, partial) and function.func is checkpoint and function.keywords.keys() <= _TRACEABLE_OPTIONS
    )


def _dropout_probabilities(layer: nn.Module) -> Iterable[tuple[ref, str]]:
    modules = list(layer.modules())
    # By identity: all modules of an encoder share one config.
    owners = {id(owner): owner for owner in [*modules, *(getattr(module, "config", None) for module in modules)]}
    for owner in owners.values():
        for name, value in getattr(owner, "__dict__", {}).items():
            is_named = "dropout" in name or (name == "p" and isinstance(owner, _DropoutNd))
            if is_named and isinstance(value, (int, float)):
                yield ref(owner), name
