"""The options of the flag, and those that are in force."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from pylate_fastmaxsim.ops.grad_filter import GradFilter

# "always": also where a model has code of somebody's own.
PaddingFree = bool | Literal["always"]

_ON = ("", "1", "true", "on", "yes")
_OFF = ("0", "false", "off", "no")
_options: Options | None = None


@dataclass(frozen=True)
class Options:
    """What :func:`enable` switched on; see there."""

    padding_free: PaddingFree = True
    compile: bool = False
    stock_masking: bool = False
    grad_filter: GradFilter = None
    ring: bool = False
    fused_head: bool = True


def current_options() -> Options | None:
    """The options in force, or None while the host libraries run as they came."""
    return _options


def set_options(new: Options | None) -> None:
    """Put options in force; None: the host libraries run as they came."""
    global _options
    _options = new


def on_or_off(value: bool | str | None) -> str:
    """The value of an option as a line of log has it."""
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
