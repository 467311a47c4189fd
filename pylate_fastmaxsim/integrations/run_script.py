"""``fastmaxsim run``: a training script as it is, with :func:`~pylate_fastmaxsim.enable` called for it."""

import argparse
import importlib.abc
import importlib.util
import logging
import os
import runpy
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import ModuleType, TracebackType
from typing import Any

from pylate_fastmaxsim.integrations.enable import enable
from pylate_fastmaxsim.integrations.hosts import HOST_PACKAGES, contains_host
from pylate_fastmaxsim.integrations.options import OPTIONS

_logger = logging.getLogger("pylate_fastmaxsim")


def run_script(arguments: Sequence[str], prog: str = "fastmaxsim run") -> None:
    """Run a Python script or module as ``python`` does, and call ``enable`` when it has imported a host library.

    The arguments are the options of ``enable``, then ``SCRIPT.py`` or ``-m MODULE`` and those of the script. What it sets
    in the environment before that import (``HF_HOME``, ``CUDA_VISIBLE_DEVICES``, ...) counts. The exit code is that of the
    script, 1 after an exception, whose traceback is printed, or 2 if there is nothing to run.
    """
    parser = script_parser(prog, "Run a training script with pylate-fastmaxsim switched on.")
    options, words, as_module = parse(parser, arguments)
    show_log()
    run_or_exit(parser, words, as_module, options)


def run_or_exit(parser: argparse.ArgumentParser, words: list[str], as_module: bool, options: dict[str, Any]) -> None:
    """Run a script with ``enable``; after an exception exit with its traceback, or with a line if there is no script."""
    try:
        run_accelerated(words, as_module, options)
    except Exception as error:
        found = traceback_of(error)
        if found is None and isinstance(error, (ImportError, OSError)):  # by runpy, which found nothing to run
            parser.error(str(error))
        sys.excepthook(type(error), error.with_traceback(found), found)
        sys.exit(1)


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> tuple[dict[str, Any], list[str], bool]:
    """The options before the script, the script or module with its arguments, and whether it is a module."""
    options = vars(parser.parse_args(arguments))
    as_module, words = options.pop("as_module"), options.pop("words")
    if words[:1] == ["--"]:
        del words[0]
    if not words:
        parser.error("name what to run: SCRIPT.py, or -m MODULE")
    return options, words, as_module


def traceback_of(error: BaseException) -> TracebackType | None:
    """The traceback of an error in a script, from the script on; None if runpy raised it, which found no script."""
    traceback = error.__traceback__
    above = {traceback.tb_frame.f_globals.get("__name__"), __name__, "runpy"}  # the first is who called, and caught it
    while traceback and traceback.tb_frame.f_globals.get("__name__") in above:
        traceback = traceback.tb_next
    return traceback


def run_accelerated(words: list[str], as_module: bool, options: dict[str, Any]) -> None:
    """Run a script as Python does, and call ``enable`` with ``options`` when it has imported a host library."""

    def enable_for(module: ModuleType) -> None:
        # Once, and not before the hosts that a host imports itself have been imported.
        if not hook.running and hook in sys.meta_path and contains_host(module.__name__):
            sys.meta_path.remove(hook)
            enable(**options, quiet=True)

    hook = AfterImport(HOST_PACKAGES, enable_for)
    sys.meta_path.insert(0, hook)
    try:
        run_as_main(words, as_module)
    finally:
        warn_if_nothing_was_accelerated(words[0])


def warn_if_nothing_was_accelerated(target: str) -> None:
    """Warn at the end of a script that has imported no host library."""
    for hook in [each for each in sys.meta_path if isinstance(each, AfterImport) and each.names == HOST_PACKAGES]:
        sys.meta_path.remove(hook)
        names = "neither PyLate nor colpali-engine nor Sentence Transformers 5 or later"
        _logger.warning("Nothing was accelerated: %s imported %s.", target, names)


def run_as_main(words: list[str], as_module: bool) -> None:
    """Run a script, or a module, whose arguments follow it in ``words``."""
    sys.argv = words
    sys.path[0] = os.getcwd() if as_module else os.path.dirname(os.path.realpath(words[0]))
    if as_module:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(os.path.abspath(words[0]), run_name="__main__")


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls ``after(module)`` when the import of one of ``names`` has ended; others are ``running``."""

    def __init__(self, names: Iterable[str], after: Callable[[ModuleType], None]) -> None:
        self.names = frozenset(names)
        self.after = after
        self.running = 0

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None):
        if name not in self.names:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None:
            spec.loader.exec_module = partial(self._execute, spec.loader.exec_module)
        return spec

    def _execute(self, execute: Callable, module: ModuleType) -> None:
        self.running += 1
        try:
            execute(module)
        finally:
            self.running -= 1
        self.after(module)


def script_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """A parser of the options of ``enable`` and, behind them, of a script and its arguments."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description=f"{description} The options are those of enable().",
        usage="%(prog)s [options] (SCRIPT.py | -m MODULE) [ARGS ...]",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    for option in OPTIONS:
        group = parser.add_mutually_exclusive_group()
        for flag, how in option.metadata["flags"].items():
            group.add_argument(f"--{flag.replace('_', '-')}", dest=option.name, **how)
    parser.add_argument("-m", dest="as_module", action="store_true", default=False, help="run a module")
    # The script and its arguments together: between two positionals argparse would drop a `--`.
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="SCRIPT.py ARGS", help="what to run")
    return parser


def show_log() -> None:
    """Print what this package logs, until the script sets up a log of its own."""
    handler = logging.StreamHandler()
    handler.addFilter(lambda record: not logging.getLogger().handlers)
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    _logger.addHandler(handler)
    _logger.setLevel(logging.INFO)
