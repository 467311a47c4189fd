"""The options of the flag, and those that are in force."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from pylate_fastmaxsim.pooling import LogSumExp, Max, Pooling, Softmax, TopK

# "always": also where a model has code of somebody's own.
PaddingFree = bool | Literal["always"]

# Poolings by the names that they have in the command line and in recipes.
POOLINGS = {"max": Max, "top_k": TopK, "softmax": Softmax, "log_sum_exp": LogSumExp}

_ON = ("", "1", "true", "on", "yes")
_OFF = ("0", "false", "off", "no")
_options: Options | None = None


@dataclass(frozen=True)
class Options:
    """What :func:`enable` switched on; see there."""

    padding_free: PaddingFree = True
    compile: bool = False
    stock_masking: bool = False
    pooling: Pooling = Max()


def current_options() -> Options | None:
    """The options in force, or None while the host libraries run as they came."""
    return _options


def set_options(new: Options | None) -> None:
    """Put options in force; None: the host libraries run as they came."""
    global _options
    _options = new


def pooling_from_text(text: str) -> Pooling:
    """The pooling that a command line names.

    Raises
    ------
    ValueError
        The text names none, or its number is not allowed.

    Examples
    --------
    >>> pooling_from_text("top_k=4"), pooling_from_text("softmax=0.5"), pooling_from_text("max")
    (TopK(k=4), Softmax(temperature=0.5), Max())
    """
    name, _, number = text.partition("=")
    kind = POOLINGS.get(name)
    try:
        return kind() if text == "max" else kind((int if kind is TopK else float)(number))
    except (TypeError, ValueError):
        raise ValueError(
            f"pooling must be max, top_k=K, softmax=T or log_sum_exp=T, with K from 1 and T above 0, got {text!r}."
        ) from None


def on_or_off(value: bool | str | Pooling | None) -> str:
    """The value of an option as a line of log has it."""
    if isinstance(value, Pooling):
        return repr(value)
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
