"""Modules, forwards and hooks of the user's own, which may look at all texts of a call.

What they do cannot be found out by trial: they may do it only in training, or only after some steps.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import BuiltinFunctionType

import torch
from torch import nn

from pylate_fastmaxsim.integrations.models.wrappers import layers_of_wrapping, unsharded
from pylate_fastmaxsim.integrations.patching.known_sources import HOSTS, LIBRARIES, defined_in, unknown_part

# Their layers treat each text by itself, or trials find that they do not; their hooks leave texts as they are.
_KNOWN = (
    *LIBRARIES,
    *HOSTS,
    "transformers_modules",  # code that came with a checkpoint
    *("bitsandbytes", "torchao", "liger_kernel", "flash_attn", "fla", "mamba_ssm", "kernels"),
    "wandb",
)

# Attributes of a module that it calls: on the instance in place of its class's, and that of Dense.
_FUNCTIONS = "forward", "activation_function"

_HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"

# Of all modules, in torch.nn.modules.module.
_GLOBAL_HOOKS = (
    *("_global_forward_hooks", "_global_forward_pre_hooks"),
    *("_global_backward_hooks", "_global_backward_pre_hooks"),
)


# Dynamo cannot trace it.
@torch.compiler.disable
def user_code(model: nn.Module, backwards: bool) -> str | None:
    """The first module or hook of a model that no known library defines, as the beginning of a sentence.

    ``backwards``: whether each call has a backward of its own, as in GradCache. Hooks on weights then see the gradients
    of each.
    """
    if any(_of_user(hook) for name in _GLOBAL_HOOKS for hook in getattr(nn.modules.module, name).values()):
        return "a hook of your own is on all modules"
    *around, core = layers_of_wrapping(model)
    modules = *around, *core.modules()
    for module in modules:
        cls = type(module)
        if _is_user_class(cls, cls.forward, _KNOWN):
            return f"{cls.__name__} is a module of your own"
        for name in _FUNCTIONS:
            function = vars(module).get(name)
            # Written in C, as torch.tanh is, it does not say which library it is from.
            if function is not None and type(function) is not BuiltinFunctionType and _of_user(function):
                return f"the {name} of {cls.__name__} is a function of your own"
        if has_user_hooks(module):
            return f"a hook of your own is on {cls.__name__}"
    # Checkpointing may run the backward of each layer's call apart.
    if backwards or any(vars(module).get("gradient_checkpointing") for module in modules):
        for name, weight in core.named_parameters():
            hooks = (weight._backward_hooks or {}), (weight._post_accumulate_grad_hooks or {})
            if any(_of_user(hook) for each in hooks for hook in each.values()):
                return f"a hook of your own is on the gradient of {name}"
    return None


def user_wrapper(model: nn.Module) -> nn.Module | None:
    """The first module around a model that no library of training defines: it may change what the model returns."""
    around = layers_of_wrapping(model)[:-1]
    return next((layer for layer in around if _is_user_class(type(layer), type(layer).forward, LIBRARIES)), None)


def custom_module(core: nn.Module) -> nn.Module | None:
    """The first of a model and its modules that may read any feature.

    That is all but PyLate's ColBERT and Dense and Sentence Transformers' Transformer, as these libraries have them.
    """
    try:
        from sentence_transformers.base.modules import Transformer
    except ImportError:  # before release 6
        from sentence_transformers.models import Transformer
    core = unsharded(core)
    known, modules = [Transformer.forward], [core]
    if hasattr(core, "_first_module"):
        from pylate.models import ColBERT, Dense

        known += [ColBERT.forward, Dense.forward]
        modules += map(unsharded, core.children())
    for module in modules:
        forward = type(module).forward
        if forward not in known or unknown_part(forward) is not None or not has_class_forward(module):
            return module
    return None


def has_class_forward(module: nn.Module) -> bool:
    """Check whether a module has the forward of its class, or what accelerate makes of that for mixed precision."""
    forward, of_class = vars(module).get("forward"), type(module).forward
    while forward is not None and getattr(forward, "__func__", forward) is not of_class:
        if not defined_in(forward, ("torch", "accelerate")) or not hasattr(forward, "__wrapped__"):
            return False
        forward = forward.__wrapped__
    return True


def has_global_hooks() -> bool:
    """Check whether anything is called before or after the forward or the backward of all modules."""
    return any(getattr(nn.modules.module, name) for name in _GLOBAL_HOOKS)


def has_hooks(module: nn.Module) -> bool:
    """Check whether anything is called before or after its forward or its backward."""
    # Written out, since all modules of a model are asked in every step.
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def has_user_hooks(module: nn.Module) -> bool:
    """Check whether a hook on its forward or its backward is of no known library."""
    return has_hooks(module) and any(_of_user(hook) for name in _HOOKS for hook in getattr(module, name).values())


def reason_in_calls(modules: Iterable[nn.Module]) -> str | None:
    """Reason in the first module whose call may do more than its class has it do."""
    changed = (module for module in modules if has_user_hooks(module) or not has_class_forward(module))
    module = next(changed, None)
    return None if module is None else f"a hook or another forward is on {type(module).__name__}"


@contextmanager
def without_user_hooks(model: nn.Module) -> Iterator[None]:
    """Context without the user's hooks on modules: one may collect a penalty, to which a trial must add nothing."""
    hooks = [getattr(module, name) for module in model.modules() if has_user_hooks(module) for name in _HOOKS]
    before = [dict(each) for each in hooks]
    for each in hooks:
        for key in [key for key, hook in each.items() if _of_user(hook)]:
            del each[key]
    try:
        yield
    finally:
        for each, kept in zip(hooks, before, strict=True):
            each.clear()
            each.update(kept)


def _of_user(function: Callable, libraries: Iterable[str] = _KNOWN) -> bool:
    """Check whether a function, or what it decorates (as ``torch.no_grad()`` may a hook), is of none of these libraries."""
    return not (defined_in(function, libraries) and defined_in(inspect.unwrap(function), libraries))


# With the forward, which somebody may replace on the class.
@lru_cache(maxsize=1024)
def _is_user_class(cls: type[nn.Module], forward: Callable, libraries: tuple[str, ...]) -> bool:
    modules = [each.__module__ for each in cls.__mro__ if issubclass(each, nn.Module)]
    return _of_user(forward, libraries) or any(name.partition(".")[0] not in libraries for name in modules)
