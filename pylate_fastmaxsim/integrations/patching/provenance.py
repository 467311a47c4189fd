"""Which library a function or an object is from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from types import FunctionType, MethodType

import torch

# They train or wrap any model.
LIBRARIES = ("torch", "accelerate", "deepspeed", "peft")

# The libraries that are patched, and this package, whose replacements stand in for theirs.
HOSTS = ("pylate", "colpali_engine", "sentence_transformers", "transformers", "pylate_fastmaxsim")

_AROUND_A_FUNCTION = MethodType, classmethod, staticmethod


# Dynamo cannot trace it.
@torch.compiler.disable
def defined_in(function: Callable, libraries: Iterable[str]) -> bool:
    """Whether a function is from one of these libraries, by the module of its code; of a ``partial``, what it calls.

    Examples
    --------
    >>> linear = torch.nn.Linear(1, 1)
    >>> defined_in(partial(type(linear).forward, linear), ("torch",)), defined_in(len, ("torch",))
    (True, False)
    """
    # By type, not isinstance: a proxy may pass for what it wraps.
    while type(function) is partial:
        function = function.func
    if type(function) in _AROUND_A_FUNCTION:
        function = function.__func__
    # Not by __module__, which functools.wraps copies from what is decorated.
    written = function.__globals__ if type(function) is FunctionType else {}
    return written.get("__name__", type(function).__module__).partition(".")[0] in libraries


def full_name(thing: object) -> str:
    """The class of an object with its module: PEFT's layers are called as PyTorch's are.

    Examples
    --------
    >>> full_name(torch.nn.Linear(1, 1))
    'torch.nn.modules.linear.Linear'
    """
    return f"{type(thing).__module__}.{type(thing).__qualname__}"
