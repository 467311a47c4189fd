"""Compile an encoder layer by layer, for any number of tokens, and gradient checkpointing with the layers."""

from collections.abc import Callable, Iterable
from functools import partial, wraps
from itertools import chain
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DataParallel
from torch.utils.checkpoint import checkpoint

from pylate_fastmaxsim.integrations.compilation import modernbert
from pylate_fastmaxsim.integrations.log import log_once
from pylate_fastmaxsim.integrations.models.encoders import encoder_of, layers_share_keys, transformer_of
from pylate_fastmaxsim.integrations.models.user_code import has_hooks
from pylate_fastmaxsim.integrations.models.wrappers import (
    is_compiled,
    is_data_parallel_copy,
    layers_of_wrapping,
    sharded_by_deepspeed,
    unwrap,
)
from pylate_fastmaxsim.integrations.patching.patches import Patch, PatchSet, detached

try:
    from transformers.modeling_layers import GradientCheckpointingLayer
except ImportError:  # an older transformers, where each encoder checkpoints in its own code
    GradientCheckpointingLayer = None

try:
    from transformers.utils import output_capturing
    from transformers.utils.output_capturing import maybe_install_capturing_hooks
except ImportError:  # an older transformers, whose encoders collect outputs in code of their own
    maybe_install_capturing_hooks = None

# Compiled variants of a layer. All layers share one limit: first, local and global layers, times queries and documents,
# times training and evaluation, times autocast on and off.
_RECOMPILE_LIMIT = 64

_compiled: WeakKeyDictionary[nn.Module, list[nn.Module]] = WeakKeyDictionary()

_patches = PatchSet()

# Options of checkpoint() that mean the same when it is traced; context_fn does not.
_TRACEABLE_OPTIONS = {"use_reentrant", "preserve_rng_state"}

_checkpointing_patches = PatchSet()

# Of each layer, the ids of its modules, and the attributes that hold its dropout probabilities with their owners.
_dropouts: WeakKeyDictionary[nn.Module, tuple[list[int], list[tuple[ref, str]]]] = WeakKeyDictionary()

# Of torch._dynamo.config while layers are compiled: the value set here, and the one before.
_settings: dict[str, tuple[object, object]] = {}


def compile_layers(model: nn.Module) -> None:
    """Compile the layers of the encoder of a model, possibly wrapped, unless they are compiled.

    All layers share what is compiled for the first. That takes seconds; a whole model takes minutes. A model that the
    user compiled is left as it is.
    """
    core = unwrap(model)
    is_copy = is_data_parallel_copy(core)
    if is_copy or any(isinstance(layer, DataParallel) for layer in layers_of_wrapping(model)):
        log_once(
            "compile=True does nothing: DataParallel copies the layers in every step; start the script with accelerate "
            "launch or torchrun.",
            about=None if is_copy else core,
        )
        _uncompile(_compiled.pop(core, []))
        return
    if sharded_by_deepspeed(core):
        # Its hooks on every module of a layer would break the graph.
        log_once("compile=True does nothing: DeepSpeed divides the weights of the model (ZeRO 3).", about=core)
        return
    if core in _compiled:
        # An adapter may have come since.
        _compile_checkpointing(_compiled[core])
        return
    if is_compiled(model):
        log_once("compile=True does nothing: the model is compiled already.", about=core)
        return
    layers = [layer for layer in encoder_layers(core) if layer._compiled_call_impl is None]
    if not layers:
        log_once("compile=True does nothing: %s has no layers left to compile.", type(core).__name__, about=core)
    elif layers_share_keys(transformer_of(core)):
        log_once(
            "compile=True compiles each layer of %s separately, which takes long: its layers share keys and values "
            "through a key-value cache.",
            type(encoder_of(core)).__name__,
            about=core,
        )
    for layer in layers:
        layer.compile(dynamic=True)
    if modernbert.install():
        modernbert.join_layers(core, layers)
    _compile_checkpointing(layers)
    _compiled[core] = [*layers, *modernbert.compile_around_layers(core)] if layers else []
    if not _settings:
        _set("recompile_limit", max(torch._dynamo.config.recompile_limit, _RECOMPILE_LIMIT))
        # Otherwise a layer with hooks would run what was compiled for one without.
        _set("skip_nnmodule_hook_guards", False)
        # Otherwise weights that are unfrozen would get no gradients: the layer would run what was compiled before.
        _set("skip_tensor_guards_with_matching_dict_tags", False)
        if torch._dynamo.config.optimize_ddp in (True, "ddp_optimizer"):
            # It splits graphs at DDP's buckets, so that gradients are sent during the backward. Layers are separate
            # graphs as it is, and split ones could not be shared.
            _set("optimize_ddp", False)
        if maybe_install_capturing_hooks is not None:
            install = _uncompiling_first(maybe_install_capturing_hooks)
            _patches.apply([Patch(output_capturing, install.__name__, install)])


def _uncompiling_first(stock: Callable) -> Callable:
    """Uncompile the layers of a model that has to return their outputs.

    transformers collects them by hooks that read a context variable, which compiled code does not see.
    """
    stock = detached(stock)

    @wraps(stock)
    def install(model: nn.Module) -> None:
        modules = set(model.modules())
        for layers in list(_compiled.values()):
            if not modules.isdisjoint(layers) and any(layer._compiled_call_impl is not None for layer in layers):
                log_once("Layers are not compiled any more: %s has to return their outputs.", type(model).__name__)
                # For good: a checkpoint must do in the backward what it did in the forward.
                _uncompile(layers)
        stock(model)

    return install


def has_compiled_layers(model: nn.Module) -> bool:
    """Check whether :func:`compile_layers` has compiled layers of a model, and they are compiled still."""
    return any(layer._compiled_call_impl is not None for layer in _compiled.get(unwrap(model), []))


def mark_varying(model: nn.Module, calls: Iterable[dict[str, Tensor]]) -> None:
    """Tell ``torch.compile(model)`` that sizes vary between calls, so that it does not compile twice to find out."""
    if not is_compiled(model):
        return
    for tensor in chain.from_iterable(call.values() for call in calls):
        # PyLate's tokenizer also returns the keys of texts that are dictionaries.
        for dim, size in enumerate(getattr(tensor, "shape", ())):
            if size > 1:
                torch._dynamo.maybe_mark_dynamic(tensor, dim)


def encoder_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of an encoder: its ``ModuleList`` with the most parameters, flattened."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return _flat(max(lists, key=lambda layers: sum(weight.numel() for weight in layers.parameters()), default=[]))


def _flat(modules: Iterable[nn.Module]) -> list[nn.Module]:
    # Funnel has a list of layers for each block. Nothing calls a list, so that compiling one would do nothing.
    return [each for module in modules for each in (_flat(module) if isinstance(module, nn.ModuleList) else [module])]


def release() -> None:
    """Undo :func:`compile_layers`."""
    for layers in _compiled.values():
        _uncompile(layers)
    _compiled.clear()
    _patches.undo()
    modernbert.release()
    _checkpointing_patches.undo()
    _dropouts.clear()
    for name, (ours, before) in _settings.items():
        if getattr(torch._dynamo.config, name) == ours:
            setattr(torch._dynamo.config, name, before)
    _settings.clear()


def _uncompile(layers: Iterable[nn.Module]) -> None:
    for layer in layers:
        layer._compiled_call_impl = None


def _set(name: str, value: object) -> None:
    _settings[name] = value, getattr(torch._dynamo.config, name)
    setattr(torch._dynamo.config, name, value)


def _compile_checkpointing(layers: Iterable[nn.Module]) -> None:
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
    if GradientCheckpointingLayer is not None and not _checkpointing_patches.targets:
        call = _with_compiled_checkpoint(GradientCheckpointingLayer.__call__)
        _checkpointing_patches.apply([Patch(GradientCheckpointingLayer, "__call__", call)])


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
