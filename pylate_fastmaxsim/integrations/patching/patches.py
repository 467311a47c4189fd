"""Reversible patches: replace a function for whoever holds it, and put everything back.

A plain function of a module is redirected: it stays the same object and runs other code. To replace the attribute of its
module is not enough, since hosts hold their scoring functions elsewhere: ``ColBERT._similarity`` and
``MultiVectorEncoder._similarity`` on each model, by which evaluators score; ``score_metric`` and ``similarity_fct`` on each
loss, from a default argument; ``partial(colbert_scores, chunk_elements=...)``, as Sentence Transformers' documentation has
it. Models and losses that were built before would score the slow way, and would not pickle, because pickle looks a
function up by its name and refuses another object.

Only ``__code__`` is exchanged, for code with the same parameters: signature, source and help stay, and
``torch.compile``, which remembers the parameters of a function but guards its code, compiles again.
"""

import functools
import inspect
import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from inspect import Parameter
from itertools import count
from types import CodeType, FunctionType, ModuleType
from weakref import WeakKeyDictionary

_logger = logging.getLogger("pylate_fastmaxsim")
_INHERITED = object()
_REPLACED_SINCE = "disable() leaves %s as it is: it was replaced after enable(), by another library or the script."

# What each redirected function runs. Nothing is taken out: a thread may be inside a function that is restored now.
targets: dict[int, Callable] = {}

# Made once for each function, so that torch.compile finds what it compiled when it is redirected again.
_code: WeakKeyDictionary[FunctionType, tuple[int, CodeType]] = WeakKeyDictionary()
_numbers = count()


@dataclass(frozen=True, eq=False)
class Patch:
    """One name to replace."""

    # A module or a class. A plain function of a module stays the same object and runs the replacement, so that whoever
    # holds it follows. On a class, the attribute of that class alone is replaced, also if it was inherited.
    owner: ModuleType | type
    name: str
    # It must call what it replaces through a copy that was detached() before.
    replacement: object
    # Functions of the host that it computes in place of, besides: code of known releases too.
    needs: tuple[Callable, ...] = ()

    @property
    def target(self) -> str:
        """Dotted name of what is replaced."""
        if isinstance(self.owner, ModuleType):
            return f"{self.owner.__name__}.{self.name}"
        return f"{self.owner.__module__}.{self.short_name}"

    @property
    def short_name(self) -> str:
        """Name within the module of what is replaced."""
        return self.name if isinstance(self.owner, ModuleType) else f"{self.owner.__qualname__}.{self.name}"

    @property
    def original(self) -> object:
        """The present value of the name; None where there is none."""
        return inspect.getattr_static(self.owner, self.name, None)


class PatchSet:
    """The patches that are applied now.

    Examples
    --------
    >>> import textwrap
    >>> patches = PatchSet()
    >>> patches.apply([Patch(textwrap, "dedent", str.upper)])
    >>> patches.targets, textwrap.dedent("  on")
    (['textwrap.dedent'], '  ON')
    >>> patches.undo()
    >>> textwrap.dedent("  off")
    'off'
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        # Of each dotted name how to put it back, which is False where somebody else has replaced it since.
        self._put_back: dict[str, Callable[[], bool]] = {}

    @property
    def targets(self) -> list[str]:
        """Dotted names of what is replaced now."""
        return list(self._put_back)

    def apply(self, patches: Iterable[Patch]) -> None:
        """Apply the patches that are not applied yet. AttributeError, and none is, where a name is missing."""
        with self._lock:
            fresh = {patch.target: patch for patch in patches if patch.target not in self._put_back}
            for target, patch in fresh.items():
                if patch.original is None:
                    raise AttributeError(f"Cannot replace {target}: there is no such name.")
            for target, patch in fresh.items():
                self._put_back[target] = _replace(patch)

    def undo(self) -> None:
        """Put back every original."""
        with self._lock:
            for target, put_back in self._put_back.items():
                if not put_back():
                    _logger.warning(_REPLACED_SINCE, target)
            self._put_back = {}


def _replace(patch: Patch) -> Callable[[], bool]:
    owner, name, original = patch.owner, patch.name, vars(patch.owner).get(patch.name, _INHERITED)
    if isinstance(owner, ModuleType) and can_redirect(original):
        return Redirection(original, patch.replacement).undo
    setattr(owner, name, patch.replacement)

    def put_back() -> bool:
        # Whoever patched after us wraps our replacement; to overwrite that would undo theirs.
        if vars(owner).get(name) is not patch.replacement:
            return False
        if original is _INHERITED:
            delattr(owner, name)
        else:
            setattr(owner, name, original)
        return True

    return put_back


def can_redirect(function: object) -> bool:
    """True of a plain Python function: undecorated, without free variables, no generator or coroutine."""
    return (
        isinstance(function, FunctionType)
        and not function.__code__.co_freevars
        and not function.__code__.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR)
        and not {"__wrapped__", "__signature__"} & vars(function).keys()
    )


def detached(function: Callable) -> Callable:
    """A copy that goes on to do what the function does now; the function itself where it cannot be redirected.

    Examples
    --------
    >>> def score():
    ...     return "stock"
    >>> stock = detached(score)
    >>> redirection = Redirection(score, lambda: f"faster than {stock()}")
    >>> score()
    'faster than stock'
    >>> redirection.undo(), score()
    (True, 'stock')
    """
    if not can_redirect(function):
        return function
    copy = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(copy, function)
    del copy.__wrapped__
    return copy


def stock_code(function: FunctionType) -> CodeType:
    """The code that a function runs while it is not redirected."""
    redirected = _code.get(function)
    is_redirected = redirected is not None and function.__code__ is redirected[1]
    return function.__wrapped__.__code__ if is_redirected else function.__code__


class Redirection:
    """Has a function run ``target`` from now on, with the arguments of the call and its own defaults.

    ``target`` must call not the function, which leads back to it, but a copy that was :func:`detached` before.
    Meanwhile ``function.__wrapped__`` is such a copy.
    """

    def __init__(self, function: FunctionType, target: Callable) -> None:
        number, self._redirected = _code.get(function) or _code.setdefault(function, _redirecting(function))
        self._function, self._stock = function, function.__code__
        targets[number] = target
        function.__wrapped__ = detached(function)
        function.__code__ = self._redirected

    def undo(self) -> bool:
        """Let the function run its own code again; False where somebody else has exchanged it, which then stays."""
        ours = self._function.__code__ is self._redirected
        if ours:
            self._function.__code__ = self._stock
        vars(self._function).pop("__wrapped__", None)
        return ours


def _redirecting(function: FunctionType) -> tuple[int, CodeType]:
    """A number for the function, and code with its parameters that calls the target of that number."""
    number = next(_numbers)
    parameters = inspect.signature(function).parameters.values()
    # Defaults are the function's and stay there.
    bare = inspect.Signature([Parameter(parameter.name, parameter.kind) for parameter in parameters])
    passed = {Parameter.VAR_POSITIONAL: "*{0}", Parameter.KEYWORD_ONLY: "{0}={0}", Parameter.VAR_KEYWORD: "**{0}"}
    arguments = ", ".join(passed.get(parameter.kind, "{0}").format(parameter.name) for parameter in parameters)
    # Not by a name in the function's module, which would be one more thing to put there and take away.
    source = f"def redirected{bare}:\n from {__name__} import targets as _t\n return _t[{number}]({arguments})\n"
    namespace: dict[str, FunctionType] = {}
    exec(compile(source, f"<{function.__module__}.{function.__qualname__}, redirected>", "exec"), namespace)
    return number, namespace["redirected"].__code__.replace(co_name=function.__name__)
