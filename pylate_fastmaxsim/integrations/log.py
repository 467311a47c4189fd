"""One line of log for each thing that a user should know, however often it is met."""

import logging
from weakref import WeakKeyDictionary

import torch

_logger = logging.getLogger("pylate_fastmaxsim")
_said: set[str] = set()
_said_about: WeakKeyDictionary[object, set[str]] = WeakKeyDictionary()


def log_once(message: str, *values: object, level: int = logging.WARNING, about: object = None) -> None:
    """Log ``message % values`` the first time this process has it to say, or has it to say about a model or a loss.

    A fallback is met on every step of a training run; one line of log is what its user can read.
    """
    line = message % values if values else message
    if about is None:
        _say(line, level)
    else:
        _say_unless(_said_about.setdefault(about, set()), line, level)


# Run while torch.compile traces, which can make no graph of it; nor of a line with values, or about something.
@torch.compiler.assume_constant_result
def _say(line: str, level: int) -> None:
    _say_unless(_said, line, level)


def _say_unless(said: set[str], line: str, level: int) -> None:
    if line not in said:
        said.add(line)
        _logger.log(level, "%s", line)


def said_about() -> dict[str, list[str]]:
    """What was said about each model and loss that is still there, by the name of its class."""
    said: dict[str, list[str]] = {}
    for about, lines in list(_said_about.items()):
        said.setdefault(type(about).__name__, []).extend(sorted(lines))
    return said


def reset_log_once() -> None:
    """Have :func:`log_once` log each line once more."""
    _said.clear()
    _said_about.clear()
