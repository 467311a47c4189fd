"""Compile an encoder layer by layer, for any number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from itertools import chain
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel

from pylate_fastmaxsim.integrations.compilation import checkpointing, modernbert
from pylate_fastmaxsim.integrations.log import log_once
from pylate_fastmaxsim.integrations.models.encoders import encoder_of, layers_share_keys, transformer_of
from pylate_fastmaxsim.integrations.models.wrappers import is_compiled, layers_of_wrapping, sharded_by_deepspeed, unwrap
from pylate_fastmaxsim.integrations.patching.patches import Patch, PatchSet, detached

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

# Of torch._dynamo.config while layers are compiled: the value set here, and the one before.
_settings: dict[str, tuple[object, object]] = {}


def compile_layers(model: nn.Module) -> None:
    """Compile the layers of the encoder of a model, possibly wrapped, unless they are compiled.

    All layers share what is compiled for the first. That takes seconds; a whole model takes minutes. A model that the
    user compiled is left as it is.
    """
    core = unwrap(model)
    if any(isinstance(layer, DataParallel) for layer in layers_of_wrapping(model)):
        log_once(
            "compile=True does nothing: DataParallel copies the layers in every step; start the script with accelerate "
            "launch or torchrun.",
            about=core,
        )
        _uncompile(_compiled.pop(core, []))
        return
    if sharded_by_deepspeed(core):
        # Its hooks on every module of a layer would break the graph.
        log_once("compile=True does nothing: DeepSpeed divides the weights of the model (ZeRO 3).", about=core)
        return
    if core in _compiled:
        # An adapter may have come since.
        checkpointing.compile_checkpointing(_compiled[core])
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
    known_layers = modernbert.patches()
    _patches.apply(known_layers)
    for layer in layers:
        layer.compile(dynamic=True)
    if known_layers:
        modernbert.join_layers(core, layers)
    checkpointing.compile_checkpointing(layers)
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
    checkpointing.release()
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
