"""Modules, forwards and hooks that somebody wrote for themselves, and what they may do to the texts of a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from inspect import getattr_static
from types import CodeType, FunctionType

import torch
from torch import nn

from pylate_fastmaxsim.integrations.models.wrappers import layers_of_wrapping, unsharded
from pylate_fastmaxsim.integrations.patching.provenance import HOSTS, LIBRARIES, defined_in, parts_of, wholly_defined_in

# Whose hooks leave embeddings and gradients as they are.
_WRITERS_OF_HOOKS = ("torch", "transformers", "peft", "accelerate", "deepspeed", "wandb", "pylate_fastmaxsim")

# Whose layers make of a text what they make of it alone, or else are caught by calls outside of training.
_WRITERS_OF_LAYERS = (
    *LIBRARIES,
    *HOSTS,
    "transformers_modules",
    *("bitsandbytes", "torchao", "liger_kernel", "flash_attn", "fla", "mamba_ssm", "kernels"),
)

_METHODS = FunctionType, property, classmethod, staticmethod


# Outside of what is compiled, as defined_in.
@torch.compiler.disable
def own_code(model: nn.Module, backwards: bool) -> str | None:
    """What in a model is of somebody's own, and may make of a text what depends on the other texts of its call.

    What it does cannot be found out by calls: it may do so only in training, after some steps, or in the backward.

    Parameters
    ----------
    model
        A ``pylate.models.ColBERT``, possibly wrapped.
    backwards
        Whether each call has a backward of its own, as in GradCache: then hooks on weights see the gradients of each.
        So they do where layers are checkpointed reentrantly.

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
    return all(wholly_defined_in(of_instance[name], _WRITERS_OF_LAYERS) for name in methods & of_instance.keys())


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
    return all(wholly_defined_in(function, _WRITERS_OF_LAYERS) for function in functions)


@lru_cache(maxsize=1024)
def _methods_of_forward(kind: type[nn.Module]) -> frozenset[str]:
    """``__call__``, ``forward``, the methods of a class that its code names, those that their code names, and so on."""
    found, unread = {"__call__", "forward"}, ["forward"]
    while unread:
        name = unread.pop()
        for function in (vars(cls)[name] for cls in kind.__mro__ if name in vars(cls)):
            codes = (part.__code__ for part in parts_of(function) if type(part) is FunctionType)
            named = set().union(*map(_names_in, codes)) - found
            methods = {each for each in named if isinstance(getattr_static(kind, each, None), _METHODS)}
            found |= methods
            unread += methods
    return frozenset(found)


def _names_in(code: CodeType) -> set[str]:
    inner = (_names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)


def unknown_wrapper(model: nn.Module) -> nn.Module | None:
    """What is around a model that may change its output: all but what was written in one of the libraries here."""
    around = layers_of_wrapping(model)[:-1]
    return next((layer for layer in around if not wholly_defined_in(type(layer).forward, LIBRARIES)), None)


def has_class_forward(module: nn.Module) -> bool:
    """Whether a module has the forward of its class, or what accelerate makes of that for mixed precision."""
    forward, of_class = vars(module).get("forward"), type(module).forward
    while forward is not None and getattr(forward, "__func__", forward) is not of_class:
        if not defined_in(forward, ("torch", "accelerate")) or not hasattr(forward, "__wrapped__"):
            return False
        forward = forward.__wrapped__
    return True


def reader(core: nn.Module) -> nn.Module | None:
    """The first module of a model, itself among them, that may look at anything in the features.

    It has no forward that is known not to: those of PyLate's model and Dense and of Sentence Transformers'
    Transformer, as these libraries have them. What is inside of a Transformer is given what that hands on.
    """
    core = unsharded(core)
    known, modules = [_transformer().forward], [core]
    if hasattr(core, "_first_module"):
        from pylate.models import ColBERT, Dense

        known += [ColBERT.forward, Dense.forward]
        modules += map(unsharded, core.children())
    for module in modules:
        forward = type(module).forward
        if forward not in known or not defined_in(forward, HOSTS) or not has_class_forward(module):
            return module
    return None


def _transformer() -> type[nn.Module]:
    try:
        from sentence_transformers.base.modules import Transformer
    except ImportError:  # before release 6
        from sentence_transformers.models import Transformer
    return Transformer


def hooks_change_nothing(module: nn.Module, of_all: bool = True, backward: bool = False) -> bool:
    """Whether its forward hooks are of libraries that leave embeddings as they are, this package among them.

    With ``of_all`` also those that all modules have, with ``backward`` also its backward hooks.
    """
    return not _has_own(_hooks_of(module, backward)) and not (of_all and _has_own(_hooks_of_all(backward=False)))


def has_hooks(module: nn.Module) -> bool:
    """Whether anything is called before or behind its forward or its backward."""
    return any(_hooks_of(module, backward=True))


def _has_own(hooks: tuple[Mapping[int, Callable], ...]) -> bool:
    # Mostly there are none; asked of every module in every step.
    return any(hooks) and any(
        not wholly_defined_in(hook, _WRITERS_OF_HOOKS) for each in hooks for hook in each.values()
    )


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
