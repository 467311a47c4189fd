"""The PyLate model inside what a trainer wraps around it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from inspect import getattr_static
from types import CellType, CodeType, FunctionType, MethodType

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

# That train or wrap models of whatever kind.
LIBRARIES = ("torch", "accelerate", "deepspeed", "peft")

# Whose code is as they came: the libraries that are patched, and this package, whose replacements stand in for theirs.
HOSTS = ("pylate", "colpali_engine", "sentence_transformers", "transformers", "pylate_fastmaxsim")

# Whose hooks leave embeddings and gradients as they are.
_WRITERS_OF_HOOKS = ("torch", "transformers", "peft", "accelerate", "deepspeed", "wandb", "pylate_fastmaxsim")

# Whose layers make of a text what they make of it alone, or else are caught by calls outside of training.
_WRITERS_OF_LAYERS = (
    *LIBRARIES,
    *HOSTS,
    "transformers_modules",
    *("bitsandbytes", "torchao", "liger_kernel", "flash_attn", "fla", "mamba_ssm", "kernels"),
)

# Who writes scoring functions that give PyLate's scores: itself, this package, and those that PyLate scores through.
SCORING = ("pylate", "pylate_fastmaxsim", "late_interaction_kernels", "flash_maxsim")


def layers_of_wrapping(model: nn.Module) -> list[nn.Module]:
    """A model and what is wrapped around it, outermost first.

    That is DistributedDataParallel, DataParallel, DeepSpeed, PEFT and ``torch.compile``. FullyShardedDataParallel
    counts as innermost: what it wraps has no whole parameters to run with.

    Examples
    --------
    >>> model = nn.Linear(1, 1)
    >>> layers_of_wrapping(nn.DataParallel(model))[-1] is model
    True
    """
    layers = [model]
    while not isinstance(layers[-1], FullyShardedDataParallel):
        layer = layers[-1]
        inner = getattr(layer, "_orig_mod", None) or getattr(layer, "module", None)
        if inner is None and hasattr(layer, "peft_config") and hasattr(layer, "get_base_model"):
            inner = layer.get_base_model()
        if not isinstance(inner, nn.Module):
            break
        layers.append(inner)
    return layers


def unwrap(model: nn.Module) -> nn.Module:
    """The innermost of :func:`layers_of_wrapping`."""
    return layers_of_wrapping(model)[-1]


def of_outermost(model: nn.Module, name: str) -> object:
    """An attribute of a PyLate model: of the outermost of :func:`layers_of_wrapping` that has it, as in its losses.

    Examples
    --------
    >>> model = nn.Linear(2, 1)
    >>> wrapper = nn.DataParallel(model)
    >>> of_outermost(wrapper, "in_features")
    2
    >>> wrapper.in_features = 3
    >>> of_outermost(wrapper, "in_features")
    3
    """
    layers = layers_of_wrapping(model)
    return getattr(next((layer for layer in layers if hasattr(layer, name)), layers[-1]), name)


def unsharded(module: nn.Module) -> nn.Module:
    """What FullyShardedDataParallel wrapped, or the module itself."""
    return module.module if isinstance(module, FullyShardedDataParallel) else module


def divided_by_deepspeed(module: nn.Module) -> bool:
    """Whether each rank has a part of its weights only (ZeRO 3), which hooks make whole while the module runs."""
    return any(hasattr(weight, "ds_id") for weight in module.parameters())


def unknown_wrapper(model: nn.Module) -> nn.Module | None:
    """What is around a model that may change its output: all but what was written in one of the libraries here."""
    around = layers_of_wrapping(model)[:-1]
    return next((layer for layer in around if not wholly_written_in(type(layer).forward, LIBRARIES)), None)


def forward_is_own(module: nn.Module) -> bool:
    """Whether a module has the forward of its class, or what accelerate makes of that for mixed precision."""
    forward, of_class = vars(module).get("forward"), type(module).forward
    while forward is not None and getattr(forward, "__func__", forward) is not of_class:
        if not written_in(forward, ("torch", "accelerate")) or not hasattr(forward, "__wrapped__"):
            return False
        forward = forward.__wrapped__
    return True


def hooks_change_nothing(module: nn.Module, of_all: bool = True, backward: bool = False) -> bool:
    """Whether its forward hooks are of libraries that leave embeddings as they are, this package among them.

    With ``of_all`` also those that all modules have, with ``backward`` also its backward hooks.
    """
    return not _has_own(_hooks_of(module, backward)) and not (of_all and _has_own(_hooks_of_all(backward=False)))


def has_hooks(module: nn.Module) -> bool:
    """Whether anything is called before or behind its forward or its backward."""
    return any(_hooks_of(module, backward=True))


def _hooks_of(module: nn.Module, backward: bool) -> tuple[Mapping[int, Callable], ...]:
    forward = module._forward_hooks, module._forward_pre_hooks, _hooks_of_accelerate(module)
    return (*forward, module._backward_hooks, module._backward_pre_hooks) if backward else forward


def _hooks_of_accelerate(module: nn.Module) -> Mapping[int, Callable]:
    """What accelerate calls in a forward that it put in the place of the module's."""
    hook = vars(module).get("_hf_hook")
    if hook is None:
        return {}
    hooks = getattr(hook, "hooks", (hook,))
    return dict(enumerate(call for each in hooks for call in (each.pre_forward, each.post_forward)))


def _hooks_of_all(backward: bool) -> tuple[Mapping[int, Callable], ...]:
    everywhere = nn.modules.module
    forward = everywhere._global_forward_hooks, everywhere._global_forward_pre_hooks
    if not backward:
        return forward
    return *forward, everywhere._global_backward_hooks, everywhere._global_backward_pre_hooks


def _has_own(hooks: tuple[Mapping[int, Callable], ...]) -> bool:
    # Mostly there are none; asked of every module in every step.
    return any(hooks) and any(
        not wholly_written_in(hook, _WRITERS_OF_HOOKS) for each in hooks for hook in each.values()
    )


def reader(core: nn.Module) -> nn.Module | None:
    """The first module of a PyLate model, itself among them, that may look at anything in the features.

    It has no forward that is known not to: those of PyLate's model and Dense and of Sentence Transformers'
    Transformer, as these libraries have them.
    """
    from pylate.models import ColBERT, Dense
    from sentence_transformers.models import Transformer

    known = (ColBERT.forward, Dense.forward, Transformer.forward)
    core = unsharded(core)
    for module in (core, *map(unsharded, core.children())):
        forward = type(module).forward
        if forward not in known or not written_in(forward, HOSTS) or not forward_is_own(module):
            return module
    return None


# Outside of what is compiled, as written_in.
@torch.compiler.disable
def own_code(model: nn.Module, backwards: bool) -> str | None:
    """What in a model is of somebody's own, and may make of a text what depends on the other texts of its call.

    What it does cannot be found out by calls: it may do so only in training, after some steps, or in the backward.

    Parameters
    ----------
    model
        A ``pylate.models.ColBERT``, possibly wrapped.
    backwards
        Whether each call has a backward of its own, as in GradCache: then hooks on weights see the gradients of each. So
        they do where layers are checkpointed reentrantly.

    Returns
    -------
    str or None
        The beginning of a sentence about a module that no known library wrote, or about a hook.
    """
    if _has_own(_hooks_of_all(backward=True)):
        return "a hook of your own is on all modules"
    *around, core = layers_of_wrapping(model)
    modules = (*around, *core.modules())
    of_libraries = {kind: _methods_of_libraries(kind) for kind in set(map(type, modules))}
    for module in modules:
        if not _forward_of_libraries(module, of_libraries[type(module)]):
            return f"{type(module).__name__} is a module of your own"
        if _has_own(_hooks_of(module, backward=True)):
            return f"a hook of your own is on {type(module).__name__}"
    backwards = backwards or any(map(_checkpoints_reentrantly, modules))
    for name, weight in core.named_parameters() if backwards else ():
        if _has_own((weight._backward_hooks or {}, weight._post_accumulate_grad_hooks or {})):
            return f"a hook of your own is on the gradient of {name}"
    return None


def _forward_of_libraries(module: nn.Module, methods: frozenset[str]) -> bool:
    """Whether known libraries wrote the forward of a module, and what it has in place of the methods of its class."""
    of_instance = vars(module)
    if methods.isdisjoint(of_instance):
        return bool(methods)
    return all(wholly_written_in(of_instance[name], _WRITERS_OF_LAYERS) for name in methods & of_instance.keys())


def _checkpoints_reentrantly(module: nn.Module) -> bool:
    if not vars(module).get("gradient_checkpointing", False):
        return False
    checkpoint = vars(module).get("_gradient_checkpointing_func")
    return getattr(checkpoint, "keywords", {}).get("use_reentrant") is not False


def _methods_of_libraries(kind: type[nn.Module]) -> frozenset[str]:
    """:func:`_methods_of_forward`, if known libraries wrote all of them; else none."""
    if issubclass(kind, torch.jit.ScriptModule):  # does not say who wrote what was compiled
        return frozenset()
    names = _methods_of_forward(kind)
    # Anew in every step: somebody may replace them.
    return names if _all_of_libraries(tuple(getattr(kind, name) for name in names)) else frozenset()


@lru_cache(maxsize=1024)
def _all_of_libraries(functions: tuple[Callable, ...]) -> bool:
    return all(wholly_written_in(function, _WRITERS_OF_LAYERS) for function in functions)


@lru_cache(maxsize=1024)
def _methods_of_forward(kind: type[nn.Module]) -> frozenset[str]:
    """``__call__``, ``forward``, the methods of a class that its code names, those that their code names, and so on."""
    found, unread = {"__call__", "forward"}, ["forward"]
    while unread:
        name = unread.pop()
        for function in (vars(cls)[name] for cls in kind.__mro__ if name in vars(cls)):
            codes = (part.__code__ for part in _parts(function) if type(part) is FunctionType)
            named = set().union(*map(_names_in, codes)) - found
            methods = {each for each in named if isinstance(getattr_static(kind, each, None), _METHODS)}
            found |= methods
            unread += methods
    return frozenset(found)


_METHODS = FunctionType, property, classmethod, staticmethod


def _names_in(code: CodeType) -> set[str]:
    inner = (_names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)


def wholly_written_in(function: Callable, libraries: Iterable[str]) -> bool:
    """Whether these libraries wrote a function and all functions that it is made of, as what is decorated in it.

    Examples
    --------
    >>> own = torch.no_grad()(lambda x: x)
    >>> written_in(own, ("torch",)), wholly_written_in(own, ("torch",))
    (True, False)
    """
    return all(written_in(part, (*libraries, "contextlib")) for part in _parts(function))


def _parts(function: object) -> list[object]:
    """The functions that a function is made of: what it decorates, what a ``partial`` calls and is given."""
    parts, inner = {}, [function]
    while inner:
        part = inner.pop()
        if type(part) is partial:
            inner += [part.func, *filter(_is_function, (*part.args, *part.keywords.values()))]
        elif isinstance(part, property):
            inner.append(part.fget)
        elif type(part) in (MethodType, classmethod, staticmethod):
            inner.append(part.__func__)
        elif id(part) not in parts:
            parts[id(part)] = part
            cells = (cell for cell in getattr(part, "__closure__", None) or () if cell != _EMPTY)
            held = (*(cell.cell_contents for cell in cells), getattr(part, "__wrapped__", None))
            inner += filter(_is_function, held)
    return list(parts.values())


_EMPTY = CellType()


def _is_function(thing: object) -> bool:
    return type(thing) in (FunctionType, MethodType, partial)


# Outside of what is compiled: dynamo cannot trace it.
@torch.compiler.disable
def written_in(function: Callable, libraries: Iterable[str]) -> bool:
    """Whether one of these libraries wrote a function, by the module of its code; of a ``partial``, what it calls.

    Examples
    --------
    >>> written_in(partial(nn.Linear.forward, nn.Linear(1, 1)), ("torch",)), written_in(len, ("torch",))
    (True, False)
    """
    # By its type alone: what decorates a function may show all that this has, its class included.
    while type(function) is partial:
        function = function.func
    if type(function) is MethodType:
        function = function.__func__
    # Not of a decorator's result, which often says the module of what it decorates.
    written = function.__globals__ if type(function) is FunctionType else {}
    return written.get("__name__", type(function).__module__).partition(".")[0] in libraries


def is_compiled(model: nn.Module) -> bool:
    """Whether ``torch.compile(model)`` or ``model.compile()`` is in force for a model as a whole."""
    return any(
        hasattr(layer, "_orig_mod") or layer._compiled_call_impl is not None for layer in layers_of_wrapping(model)
    )


def group_in_step(model: nn.Module, backwards: bool = False) -> dist.ProcessGroup | None:
    """The ranks of a distributed run that must call a model equally often, because each call waits for all of them.

    With ``backwards`` also because the backward does that each call is to have. ``None`` where each rank may go its
    way.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None
    *around, core = layers_of_wrapping(model)
    waiting = (layer for layer in around if _waits(layer, backwards))
    group = next((getattr(layer, "process_group", dist.group.WORLD) for layer in waiting), None)
    # Also where no more of a model is sharded than its encoder. Of what is sharded other groups may hold copies.
    if any(isinstance(module, (FullyShardedDataParallel, FSDPModule)) for module in core.modules()):
        group = dist.group.WORLD
    return group if group is not None and dist.get_world_size(group) > 1 else None


def unsent(model: nn.Module) -> AbstractContextManager:
    """Wherein gradients of weights stay on this rank where they can, to be sent with those of a backward outside.

    They cannot where somebody else sends them or needs each exchange: FSDP would hold whole gradients, a static graph
    counts on its first backward being sent, and what is compiled as a whole would be compiled twice.
    """
    if isinstance(model, DistributedDataParallel) and not model.static_graph:
        return model.no_sync()
    return nullcontext()


def _waits(layer: nn.Module, backwards: bool) -> bool:
    if isinstance(layer, DistributedDataParallel):
        # One backward of many calls exchanges gradients once. The Sentence Transformers trainer broadcasts no buffers,
        # and where no gradients are exchanged they are broadcast in the first of any number of calls.
        broadcasts = layer.require_backward_grad_sync and layer.broadcast_buffers and len(layer.modules_buffers) > 0
        return torch.is_grad_enabled() and (backwards or broadcasts)
    return written_in(type(layer).forward, ("deepspeed",))
