"""Check where a function is from: which library, and whether it is the code that a replacement was written against.

``known_sources.json`` holds, for each function that is replaced and for each function of the host that it calls, a
digest of its source in the known releases. A function of another release with the same source is known too. One that
was edited, replaced or written for a later release is not; then the host's own code runs. So it does where the source
cannot be read. ``python -m tools.record_sources`` adds releases to the table.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import linecache
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from weakref import WeakKeyDictionary

import torch

from pylate_fastmaxsim.integrations.patching.patches import stock_code

TABLE = Path(__file__).with_name("known_sources.json")

# They train or wrap any model.
LIBRARIES = ("torch", "accelerate", "deepspeed", "peft")

# The libraries that are patched, and this package, whose replacements stand in for theirs.
HOSTS = ("pylate", "colpali_engine", "sentence_transformers", "transformers", "pylate_fastmaxsim")

_AROUND_A_FUNCTION = MethodType, classmethod, staticmethod
_PACKAGE = __name__.partition(".")[0]
_SELF = "self."

# Fields of a syntax tree that change nothing: annotations, and what a Python release says of its own.
_SILENT_FIELDS = {"annotation", "returns", "ctx", "kind", "type_comment", "type_params", "simple"}

# Of each function that was found to be known: the code or number that every name in it and below it stood for.
_found: WeakKeyDictionary[FunctionType, list[_Reference]] = WeakKeyDictionary()

# A name in the code of a function, resolved in its module or its class, and what it stood for.
_Reference = tuple[FunctionType, str, object]


class _UnknownError(Exception):
    """The name of a function that is not known."""


@lru_cache(maxsize=1)
def known() -> dict[str, dict[str, dict]]:
    """For the dotted name of each function, by digest: the ``releases`` with that source, and what it ``uses``.

    ``uses`` maps names in the code to the dotted names of the host's functions, or to numbers.
    """
    return json.loads(TABLE.read_text(encoding="utf-8"))


# Outside of what is compiled: dynamo cannot trace it.
@torch.compiler.disable
def unknown_part(function: Callable, instance: object = None) -> str | None:
    """The dotted name of the first part of a host's function that is not the code of a known release; None if all is.

    ``function`` is as the host defines it, or one of this package's replacements for it. ``instance`` is the object whose
    method it is: none of the methods that it calls may be set on the object or overridden, else "its calculate_loss".
    """
    function = host_function(function)
    if function is None:
        return "a callable"
    references = _found.get(function)
    if references is None or not all(_resolve(of, name) is value for of, name, value in references):
        try:
            references = _found[function] = list(_references(function, set()))
        except _UnknownError as error:
            return str(error)
    if instance is None:
        return None
    methods = ((name.removeprefix(_SELF), value) for _, name, value in references if name.startswith(_SELF))
    changed = (name for name, value in methods if _code_on(instance, name) is not value)
    return next((f"its {name}" for name in changed), None)


def not_known(part: str) -> str:
    """The reason that a line of log gives for what :func:`unknown_part` returned."""
    return (
        f"{part} is not the code of a release that pylate-fastmaxsim knows (it was replaced or edited, or is of an older "
        "or newer release; for a newer one, see whether pylate-fastmaxsim has an update)"
    )


def dotted_name(function: FunctionType) -> str:
    return f"{function.__globals__.get('__name__')}.{function.__qualname__}"


def code_of(function: object) -> CodeType | None:
    """The code of a host's function, also while it is replaced by this package, bound or compiled."""
    function = host_function(function)
    return None if function is None else stock_code(function)


def digest(code: CodeType) -> str | None:
    """A digest of the source that a code object was made from, without comments, docstrings and annotations.

    None where the source cannot be read or is not what runs.
    """
    node = _definition(code)
    return None if node is None else digest_of(node)


def digest_of(node: ast.FunctionDef) -> str:
    return hashlib.sha256(_text(node).encode()).hexdigest()[:16]


def _references(function: FunctionType, seen: set[str]) -> Iterator[_Reference]:
    """The names that a function and all below it use, without those ``seen``. Raises _UnknownError if one is not known."""
    name = dotted_name(function)
    seen.add(name)
    rows = known().get(name)
    row = None if rows is None else rows.get(digest(stock_code(function)))
    if row is None:
        raise _UnknownError(name)
    for used, what in row["uses"].items():
        value = _resolve(function, used)
        if not isinstance(what, str):
            if value != what:
                raise _UnknownError(f"{function.__module__}.{used}")
            yield function, used, value
            continue
        inner = host_function(_look_up(function, used))
        if inner is None or dotted_name(inner) != what:
            raise _UnknownError(what)
        yield function, used, value
        if what not in seen:
            yield from _references(inner, seen)


def _resolve(function: FunctionType, name: str) -> object:
    """The code of the function, or the number, that a name in a function's code stands for now."""
    value = _look_up(function, name)
    return value if isinstance(value, (int, float)) else code_of(value)


def _look_up(function: FunctionType, name: str) -> object:
    if name.startswith(_SELF):
        owner = function.__qualname__.rpartition(".")[0]
        name = f"{owner}.{name.removeprefix(_SELF)}"
    value: object = None
    for place, part in enumerate(name.split(".")):
        value = getattr(value, part, None) if place else function.__globals__.get(part)
    return value


def _code_on(instance: object, name: str) -> CodeType | None:
    own = vars(instance).get(name)
    # XTRScores.compile() sets what torch.compile makes of the method.
    if own is not None and not _is_compiled(own):
        return None
    return code_of(getattr(type(instance), name, None) if own is None else own)


def _is_compiled(function: object) -> bool:
    """True of what torch.compile made: a function of PyTorch's that remembers what it compiles."""
    return (
        type(function) is FunctionType
        and function.__globals__.get("__name__", "").startswith("torch._dynamo")
        and "_torchdynamo_orig_callable" in vars(function)
    )


def host_function(function: object) -> FunctionType | None:
    """The plain function inside of a method or property, of what is compiled, and of this package's replacements."""
    while (inner := _inside(function)) is not None:
        function = inner
    return function if type(function) is FunctionType else None


def _inside(function: object) -> object | None:
    if type(function) in _AROUND_A_FUNCTION:
        return function.__func__
    if type(function) is property:
        return function.fget
    if _is_compiled(function):
        return function._torchdynamo_orig_callable
    # By where its code is: what a decorator of somebody's own returns may show all that it decorates.
    module = function.__globals__.get("__name__", "") if type(function) is FunctionType else ""
    wraps = module == "contextlib" or module.partition(".")[0] == _PACKAGE
    return vars(function).get("__wrapped__") if wraps else None


@lru_cache(maxsize=1024)
def _definition(code: CodeType) -> ast.FunctionDef | None:
    """The definition of a function in the file that its code says it is from, if that compiles to this code."""
    compiled = _codes_of(code.co_filename).get((code.co_name, code.co_firstlineno))
    if compiled is None or _content(code) != _content(compiled):
        return None
    # Not all of the file, for whose tree the garbage collector would look at everything that is imported.
    source = inspect.getsource(code)
    tree = ast.parse(f"if True:\n{source}" if source[0].isspace() else source)
    return next((node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)), None)


@lru_cache(maxsize=64)
def _codes_of(path: str) -> dict[tuple[str, int], CodeType]:
    linecache.checkcache(path)
    try:
        codes = [compile("".join(linecache.getlines(path)), path, "exec", dont_inherit=True)]
    except (SyntaxError, ValueError):
        return {}
    for code in codes:
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
    return {(code.co_name, code.co_firstlineno): code for code in codes}


def _content(code: CodeType) -> tuple:
    """Instructions, names and constants of a code object. ``==`` would also compare what Python notes in it as it runs."""
    names = ("co_code", "co_names", "co_varnames", "co_freevars", "co_argcount", "co_kwonlyargcount", "co_flags")
    return (
        *(getattr(code, name) for name in names),
        *(_content(each) if isinstance(each, CodeType) else (type(each), each) for each in code.co_consts),
    )


def _text(node: object) -> str:
    """A syntax tree as text, the same in each release of Python."""
    if isinstance(node, list):
        return f"[{','.join(map(_text, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = []
    for name, value in ast.iter_fields(node):
        if name == "body" and isinstance(value, list):
            value = [each for each in value if not _is_docstring(each)]
        if name not in _SILENT_FIELDS and value not in (None, []):
            fields.append(f"{name}={_text(value)}")
    return f"{type(node).__name__}({','.join(fields)})"


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


# Dynamo cannot trace it.
@torch.compiler.disable
def defined_in(function: Callable, libraries: Iterable[str]) -> bool:
    """Check that a function is from one of these libraries, by the module of its code; of a ``partial``, what it calls.

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
