"""The flag: switch the acceleration of PyLate on and off."""

from __future__ import annotations

import importlib
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from pylate_fastmaxsim.integrations.patching import Patch, PatchSet
from pylate_fastmaxsim.ops import grad_filter as grad_filters
from pylate_fastmaxsim.ops.grad_filter import GradFilter

_logger = logging.getLogger("pylate_fastmaxsim")
_lock = threading.RLock()
_patches = PatchSet()
_options: Options | None = None

_ON = ("", "1", "true", "on", "yes")
_OFF = ("0", "false", "off", "no")
_PROVIDERS = ("pylate_scores", "pylate_losses", "pylate_collator", "uninspected_masks")


@dataclass(frozen=True)
class Options:
    """What :func:`enable` switched on; see there."""

    padding_free: bool = True
    compile: bool = False
    stock_masking: bool = False
    grad_filter: GradFilter = None


def options() -> Options | None:
    """The options in force, or None while PyLate runs as it came."""
    return _options


def enable(
    *,
    padding_free: bool = True,
    compile: bool = False,
    stock_masking: bool = False,
    grad_filter: GradFilter = None,
) -> None:
    """Make PyLate compute its scores and losses without a similarity tensor and without padding.

    Call it before or after the model and the loss are built, and whether PyLate's functions were
    imported before or will be. Calling it again changes the options. :func:`disable` takes it back.

    Scores keep their meaning with two differences that show: they are float32 for bfloat16 and
    float16 input (stock sums in the input's dtype), and a masked document token never wins (stock
    gives it the similarity 0, which wins over negative ones).

    Parameters
    ----------
    padding_free
        Encode the documents of a batch back to back in one forward, without padding tokens.
    compile
        Compile the encoder's layers for a varying number of tokens.
    stock_masking
        Let a masked document token count with similarity 0, as stock PyLate does, to reproduce
        runs that were made with it.
    grad_filter
        ``"auto"``: the backward of a loss's scores skips pairs of a query and a document whose gradients are too small
        to matter, of each query at most 2**-12 of the sum of its absolute gradients.

    Raises
    ------
    ImportError
        PyLate is not installed, or not in a version from 1.5.1 up to but not including 2.
    ValueError
        The environment variable ``PYLATE_FASTMAXSIM`` says neither on nor off, or ``grad_filter`` is neither
        ``"auto"`` nor ``None``.

    Notes
    -----
    ``PYLATE_FASTMAXSIM=0`` in the environment turns this call into a line of log.

    Examples
    --------
    >>> import pylate_fastmaxsim
    >>> from pylate import scores
    >>> pylate_fastmaxsim.enable()
    >>> scores.colbert_scores([[[1.0, 0.0]]], [[[0.5, 0.5], [1.0, 0.0]]])
    tensor([[1.]])
    >>> pylate_fastmaxsim.disable()
    """
    grad_filters.check(grad_filter)
    if forbidden():
        _logger.info("PYLATE_FASTMAXSIM=%s: PyLate runs as it came.", os.environ["PYLATE_FASTMAXSIM"])
        return
    new = Options(padding_free, compile, stock_masking, grad_filter)
    _switch_to(new)
    _logger.info(
        "PyLate %s is accelerated: fused MaxSim in scores, losses, rerank and evaluation; %s.",
        importlib.import_module("pylate").__version__,
        ", ".join(f"{name} {_said(value)}" for name, value in asdict(new).items()),
    )


def disable() -> None:
    """Put PyLate back as it came. Does nothing where it is.

    Examples
    --------
    >>> import pylate_fastmaxsim
    >>> pylate_fastmaxsim.disable()
    """
    _switch_to(None)


@contextmanager
def enabled(
    *,
    padding_free: bool = True,
    compile: bool = False,
    stock_masking: bool = False,
    grad_filter: GradFilter = None,
) -> Iterator[None]:
    """:func:`enable` for the length of a ``with`` block; then what was in force before is again.

    Examples
    --------
    >>> import pylate_fastmaxsim
    >>> from pylate import scores
    >>> with pylate_fastmaxsim.enabled(stock_masking=True):
    ...     scores.colbert_scores([[[1.0]]], [[[-2.0], [5.0]]], documents_mask=[[True, False]])
    tensor([[0.]])
    """
    before = options()
    enable(padding_free=padding_free, compile=compile, stock_masking=stock_masking, grad_filter=grad_filter)
    try:
        yield
    finally:
        _switch_to(before)


def _said(value: bool | str | None) -> str:
    return value if isinstance(value, str) else "on" if value else "off"


def forbidden() -> bool:
    """Whether the environment variable ``PYLATE_FASTMAXSIM`` forbids to switch on.

    Raises
    ------
    ValueError
        It says neither on nor off.
    """
    value = os.environ.get("PYLATE_FASTMAXSIM", "").strip().lower()
    if value not in _ON + _OFF:
        raise ValueError(f"PYLATE_FASTMAXSIM must be 1, true, on, yes, 0, false, off or no, got {value!r}.")
    return value in _OFF


def available_patches() -> list[Patch]:
    """What :func:`enable` replaces in PyLate. Imports PyLate.

    Raises
    ------
    ImportError
        As :func:`enable`.
    """
    _require_pylate()
    providers = [importlib.import_module(f"pylate_fastmaxsim.integrations.{name}") for name in _PROVIDERS]
    return [patch for provider in providers for patch in provider.patches()]


def _switch_to(new: Options | None) -> None:
    global _options
    with _lock:
        if new == _options:
            return
        if _options is None:
            _patches.apply(available_patches())
        else:
            # Models that were prepared for the old options go back to how they were built.
            from pylate_fastmaxsim.integrations import packing

            packing.release()
        if new is None:
            _patches.undo()
        _options = new


def _require_pylate() -> None:
    try:
        import pylate
    except ModuleNotFoundError as error:
        if error.name != "pylate":
            raise
        raise ImportError(
            'pylate-fastmaxsim accelerates PyLate, which is not installed: pip install "pylate-fastmaxsim[pylate]".'
        ) from error
    from packaging.version import Version

    if not (1, 5, 1) <= Version(pylate.__version__).release < (2,):
        raise ImportError(
            f"pylate-fastmaxsim accelerates PyLate from 1.5.1 up to but not including 2; installed is {pylate.__version__}."
        )
