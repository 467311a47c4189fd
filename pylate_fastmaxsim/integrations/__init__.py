"""Where the operators meet the libraries that train retrievers: the only modules that import one."""

import logging

_logger = logging.getLogger("pylate_fastmaxsim")
_said: set[str] = set()


def log_once(message: str, *values: object, level: int = logging.WARNING) -> None:
    """Log ``message % values`` the first time this process has it to say.

    A fallback is met on every step of a training run; one line of log is what its user can read.
    """
    line = message % values
    if line not in _said:
        _said.add(line)
        _logger.log(level, "%s", line)
