"""Which library wrote a function: a module or a hook of a known one does to a text what that library says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from types import CellType, FunctionType, MethodType

import torch

# That train or wrap models of whatever kind.
LIBRARIES = ("torch", "accelerate", "deepspeed", "peft")

# Whose code is as they came: the libraries that are patched, and this package, whose replacements stand in for theirs.
HOSTS = ("pylate", "colpali_engine", "sentence_transformers", "transformers", "pylate_fastmaxsim")

# Who writes scoring functions that give PyLate's scores: itself, this package, and those that PyLate scores through.
SCORING = ("pylate", "pylate_fastmaxsim", "late_interaction_kernels", "flash_maxsim")

_AROUND_A_FUNCTION = MethodType, classmethod, staticmethod

_EMPTY = CellType()


# Outside of what is compiled: dynamo cannot trace it.
@torch.compiler.disable
def defined_in(function: Callable, libraries: Iterable[str]) -> bool:
    """Whether one of these libraries wrote a function, by the module of its code; of a ``partial``, what it calls.

    Examples
    --------
    >>> linear = torch.nn.Linear(1, 1)
    >>> defined_in(partial(type(linear).forward, linear), ("torch",)), defined_in(len, ("torch",))
    (True, False)
    """
    # By its type alone: what decorates a function may show all that this has, its class included.
    while type(function) is partial:
        function = function.func
    if type(function) in _AROUND_A_FUNCTION:
        function = function.__func__
    # Not of a decorator's result, which often says the module of what it decorates.
    written = function.__globals__ if type(function) is FunctionType else {}
    return written.get("__name__", type(function).__module__).partition(".")[0] in libraries


def wholly_defined_in(function: Callable, libraries: Iterable[str]) -> bool:
    """Whether these libraries wrote a function and all functions that it is made of, as what is decorated in it.

    Examples
    --------
    >>> own = torch.no_grad()(lambda x: x)
    >>> defined_in(own, ("torch",)), wholly_defined_in(own, ("torch",))
    (True, False)
    """
    return all(defined_in(part, (*libraries, "contextlib")) for part in parts_of(function))


def parts_of(function: object) -> list[object]:
    """The functions that a function is made of: what it decorates, what a ``partial`` calls and is given."""
    parts, inner = {}, [function]
    while inner:
        part = inner.pop()
        if type(part) is partial:
            inner += [part.func, *filter(_is_function, (*part.args, *part.keywords.values()))]
        elif isinstance(part, property):
            inner.append(part.fget)
        elif type(part) in _AROUND_A_FUNCTION:
            inner.append(part.__func__)
        elif id(part) not in parts:
            parts[id(part)] = part
            cells = (cell for cell in getattr(part, "__closure__", None) or () if cell != _EMPTY)
            held = (*(cell.cell_contents for cell in cells), getattr(part, "__wrapped__", None))
            inner += filter(_is_function, held)
    return list(parts.values())


def _is_function(thing: object) -> bool:
    return type(thing) in (FunctionType, MethodType, partial)
