"""Where the operators meet the libraries that train retrievers: but for recipes/ the only modules that import one."""

import logging
from weakref import WeakKeyDictionary

_logger = logging.getLogger("pylate_fastmaxsim")
_said: set[str] = set()
_said_about: WeakKeyDictionary[object, set[str]] = WeakKeyDictionary()


def log_once(message: str, *values: object, level: int = logging.WARNING, about: object = None) -> None:
    """Log ``message % values`` the first time this process has it to say, or has it to say about a model or a loss.

    A fallback is met on every step of a training run; one line of log is what its user can read.
    """
    line = message % values
    said = _said if about is None else _said_about.setdefault(about, set())
    if line not in said:
        said.add(line)
        _logger.log(level, "%s", line)


def forget_what_was_said() -> None:
    """Have :func:`log_once` say everything once more."""
    _said.clear()
    _said_about.clear()
