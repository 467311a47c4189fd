"""Reversible patches: replace a function for whoever holds it, and put everything back."""

from __future__ import annotations

import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType

from pylate_fastmaxsim.integrations.patching.redirect import Redirection, can_redirect

_logger = logging.getLogger("pylate_fastmaxsim")
_PACKAGE = __name__.partition(".")[0]
_INHERITED = object()
_REPLACED_SINCE = "disable() leaves %s as it is: it was replaced after enable(), by another library or the script."


@dataclass(frozen=True, eq=False)
class Patch:
    """One name to replace.

    Parameters
    ----------
    owner
        The module or the class that has the name. A plain function of a module stays the same object and runs the
        replacement, so that whoever holds it follows. Anything else that a module defines is replaced there and in
        every loaded module that holds the same object, ``__main__`` included. On a class, the attribute of that class
        alone is replaced, also if it was inherited.
    name
        The attribute of ``owner`` to replace.
    replacement
        What stands there, or is run, while the patch is applied. It must call what it replaces through a copy that
        was :func:`~pylate_fastmaxsim.integrations.patching.redirect.detached` before.
    needs
        Functions of the host that the replacement computes in place of, besides: code of known releases too.
    """

    owner: ModuleType | type
    name: str
    replacement: object
    needs: tuple[Callable, ...] = ()

    @property
    def target(self) -> str:
        """Dotted name of what is replaced."""
        if isinstance(self.owner, ModuleType):
            return f"{self.owner.__name__}.{self.name}"
        return f"{self.owner.__module__}.{self.short_name}"

    @property
    def short_name(self) -> str:
        """The same without the module."""
        return self.name if isinstance(self.owner, ModuleType) else f"{self.owner.__qualname__}.{self.name}"

    @property
    def original(self) -> object:
        """What stands there now; None where there is no such name."""
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
        self._redirected: dict[str, Redirection] = {}
        self._replaced: dict[str, tuple[Patch, object]] = {}

    @property
    def targets(self) -> list[str]:
        """Dotted names of what is replaced now."""
        return [*self._redirected, *self._replaced]

    def apply(self, patches: Iterable[Patch]) -> None:
        """Apply the patches that are not applied yet; all of them or, where a name is missing, none.

        Raises
        ------
        AttributeError
            An owner has no attribute of that name.
        """
        with self._lock:
            applied = self.targets
            fresh = {patch.target: (patch, _original(patch)) for patch in patches if patch.target not in applied}
            replaced = {}
            for target, (patch, original) in fresh.items():
                if isinstance(patch.owner, ModuleType) and can_redirect(original):
                    self._redirected[target] = Redirection(original, patch.replacement)
                else:
                    setattr(patch.owner, patch.name, patch.replacement)
                    replaced[target] = patch, original
            self._replaced |= replaced
            _swap({id(original): patch.replacement for patch, original in _of_modules(replaced)})

    def undo(self) -> None:
        """Put back every original, also in modules that imported a replacement in the meantime."""
        with self._lock:
            for target, redirection in self._redirected.items():
                if not redirection.undo():
                    _logger.warning(_REPLACED_SINCE, target)
            for patch, original in self._replaced.values():
                if vars(patch.owner).get(patch.name) is not patch.replacement:
                    # Whoever patched after us wraps our replacement; to overwrite that would undo theirs.
                    _logger.warning(_REPLACED_SINCE, patch.target)
                elif original is _INHERITED:
                    delattr(patch.owner, patch.name)
                else:
                    setattr(patch.owner, patch.name, original)
            _swap({id(patch.replacement): original for patch, original in _of_modules(self._replaced)})
            self._redirected, self._replaced = {}, {}


def _original(patch: Patch) -> object:
    if patch.original is None:
        raise AttributeError(f"Cannot replace {patch.target}: there is no such name.")
    return vars(patch.owner).get(patch.name, _INHERITED)


def _of_modules(replaced: Mapping[str, tuple[Patch, object]]) -> Iterable[tuple[Patch, object]]:
    return (entry for entry in replaced.values() if isinstance(entry[0].owner, ModuleType))


def _swap(objects: Mapping[int, object]) -> None:
    """In every loaded module, put ``objects[id(value)]`` in the place of ``value``."""
    if not objects:  # mostly: functions are redirected, and to look through all modules takes 50 ms
        return
    for module in list(sys.modules.values()):
        try:
            # Not vars(): a lazily loaded module overrides attribute access, and would load now.
            namespace = object.__getattribute__(module, "__dict__")
        except AttributeError:
            continue
        if not isinstance(namespace, dict):
            continue
        # Our own modules hold originals and replacements side by side, on purpose.
        if str(namespace.get("__name__")).partition(".")[0] == _PACKAGE:
            continue
        for name, value in list(namespace.items()):
            if id(value) in objects:
                namespace[name] = objects[id(value)]
