"""The options of :func:`~pylate_fastmaxsim.enable`, and those that are in force.

Each is a field of :class:`Options`, which says what it may be, in which hosts it applies and how a command line names it.
The check of values, the parsers of ``fastmaxsim run`` and ``compare``, the section ``fast`` of a recipe and the table of the
README are made from these fields.
"""

from __future__ import annotations

import os
from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import wraps
from inspect import signature
from typing import Any, Literal, ParamSpec, TypeVar

from pylate_fastmaxsim._checks import suggestion
from pylate_fastmaxsim.pooling import LogSumExp, Max, Pooling, Softmax, TopK, check_pooling

# "always": also where a model has code of somebody's own.
PaddingFree = bool | Literal["always"]

P = ParamSpec("P")
R = TypeVar("R")

PYLATE, SENTENCE_TRANSFORMERS, COLPALI = "PyLate", "Sentence Transformers", "colpali-engine"

# Poolings by the names that they have in the command line and in recipes.
POOLINGS = {"max": Max, "top_k": TopK, "softmax": Softmax, "log_sum_exp": LogSumExp}

_ON = ("", "1", "true", "on", "yes")
_OFF = ("0", "false", "off", "no")
_options: Options | None = None


def pooling_from_text(text: str) -> Pooling:
    """The pooling that a command line names: ``max``, ``top_k=4`` or ``softmax=0.5``. Raises ArgumentTypeError."""
    name, _, number = text.partition("=")
    pooling = POOLINGS.get(name)
    try:
        return pooling() if text == "max" else pooling((int if pooling is TopK else float)(number))
    except (TypeError, ValueError):
        raise ArgumentTypeError(
            f"pooling must be max, top_k=K, softmax=T or log_sum_exp=T, with K from 1 and T above 0, got {text!r}."
        ) from None


def _option(default: Any, meaning: str, hosts: tuple[str, ...], values: tuple, **flags: dict[str, Any]) -> Any:
    """An option: a line of the README, the hosts that have it, its values (empty: a pooling) and its flags for argparse."""
    return field(default=default, metadata={"meaning": meaning, "hosts": hosts, "values": values, "flags": flags})


@dataclass(frozen=True)
class Options:
    """The options of :func:`~pylate_fastmaxsim.enable`; see there, also for the errors that are raised here."""

    padding_free: PaddingFree = _option(
        True,
        'encode without padding. `"always"`: also in a model with modules or hooks of your own, if they treat each text '
        "by itself",
        (PYLATE, SENTENCE_TRANSFORMERS),
        (True, False, "always"),
        no_padding_free={"action": "store_false", "help": "encode with padding"},
        padding_free={"choices": ["always"], "help": "also with modules or hooks of your own"},
    )
    compile: bool = _option(
        False,
        "compile the encoder's layers once, for any number of tokens",
        (PYLATE, SENTENCE_TRANSFORMERS),
        (True, False),
        compile={"action": "store_true", "help": "compile the encoder's layers"},
    )
    stock_masking: bool = _option(
        False,
        "let masked document tokens compete with similarity 0, as stock PyLate does, to reproduce old runs",
        (PYLATE,),
        (True, False),
        stock_masking={"action": "store_true", "help": "masked tokens have similarity 0, as in PyLate"},
    )
    pooling: Pooling = _option(
        Max(),
        "pool similarities with `TopK(k)`, `Softmax(t)` or `LogSumExp(t)` in place of the maximum "
        "([docs/losses.md#pooling](docs/losses.md#pooling))",
        (PYLATE, SENTENCE_TRANSFORMERS, COLPALI),
        (),
        pooling={"type": pooling_from_text, "help": "max, top_k=K, softmax=T or log_sum_exp=T, in place of MaxSim"},
    )

    def __post_init__(self) -> None:
        check_pooling("enable", self.pooling)
        for option in OPTIONS:
            value, values = getattr(self, option.name), option.metadata["values"]
            if values and (type(value), value) not in [(type(each), each) for each in values]:
                *most, last = map(repr, values)
                raise TypeError(f"{option.name} must be {', '.join(most)} or {last}, got {value!r}.")
        if self.stock_masking and not isinstance(self.pooling, Max):
            raise ValueError(
                "stock_masking=True takes pooling=Max() only, since PyLate's rule for masked tokens is one for the "
                f"maximum, got {self.pooling!r}."
            )


OPTIONS = fields(Options)


def refuse_unknown_options(function: Callable[P, R]) -> Callable[P, R]:
    """Have a function whose keywords are the options suggest the nearest name for one that is none."""

    names = list(signature(function).parameters)

    @wraps(function)
    def checked(*arguments: P.args, **options: P.kwargs) -> R:
        for name in options:
            if name not in names:
                hint = suggestion(name, names, "its options are")
                raise TypeError(f"{function.__name__}() has no option {name!r}; {hint}")
        return function(*arguments, **options)

    return checked


def current_options() -> Options | None:
    """The options in force, or None while the host libraries run as they came."""
    return _options


def set_options(new: Options | None) -> None:
    """Put options in force; None: the host libraries run as they came."""
    global _options
    _options = new


def switched_off() -> str | None:
    """The setting of ``PYLATE_FASTMAXSIM`` if it forbids to switch on. Raises ValueError if it says neither on nor off."""
    value = os.environ.get("PYLATE_FASTMAXSIM", "")
    word = value.strip().lower()
    if word not in _ON + _OFF:
        raise ValueError(f"PYLATE_FASTMAXSIM must be 1, true, on, yes, 0, false, off or no, got {word!r}.")
    return f"PYLATE_FASTMAXSIM={value}" if word in _OFF else None
