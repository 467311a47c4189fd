"""Run somebody's training script with the library that it trains with accelerated, without editing it."""

from __future__ import annotations

import argparse
import builtins
import dataclasses
import importlib.abc
import importlib.util
import logging
import os
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from types import FrameType, ModuleType, TracebackType
from typing import NoReturn

from pylate_fastmaxsim.integrations.enable import enable
from pylate_fastmaxsim.integrations.hosts import HOST_PACKAGES, brings_host
from pylate_fastmaxsim.integrations.options import Options, forbidden

_logger = logging.getLogger("pylate_fastmaxsim")


def run_script(arguments: Sequence[str], prog: str = "fastmaxsim run") -> None:
    """Run a Python script or module as ``python`` would, with :func:`~pylate_fastmaxsim.enable` called for it.

    ``enable`` is called when the script imports PyLate, colpali-engine or Sentence Transformers with a
    MultiVectorEncoder, not before: what the script sets in the environment first (``HF_HOME``,
    ``CUDA_VISIBLE_DEVICES``, ...) counts as it does without us.

    Parameters
    ----------
    arguments
        The words of the command line: ``[--no-padding-free | --padding-free always] [--compile] [--stock-masking]
        [--grad-filter auto] [--ring] [--no-fused-head] SCRIPT.py ARGS...``, or ``-m module`` in the place of
        ``SCRIPT.py``. What follows belongs to the script.
    prog
        What the command is called in its messages.

    Raises
    ------
    SystemExit
        With the script's exit code; 1 after an exception of the script, whose traceback is printed;
        2 where the command line is wrong or there is nothing to run.
    """
    parsed = _parse(arguments, prog)
    try:
        forbidden()
    except ValueError as error:
        _stop(prog, str(error))
    if parsed.target is None:
        _stop(prog, "name what to run: SCRIPT.py, or -m MODULE.")
    if parsed.module:
        _require_module(prog, parsed.target)
    elif not os.path.isfile(parsed.target):
        _stop(prog, f"there is no script {parsed.target!r}.")

    _show_log()
    sys.argv = [parsed.target, *parsed.arguments]
    if not getattr(sys.flags, "safe_path", False):
        script_folder = os.path.dirname(os.path.realpath(parsed.target))
        sys.path[0] = os.getcwd() if parsed.module else script_folder
    try:
        _run(parsed)
    except Exception as error:
        error = error.with_traceback(_without_launcher(error.__traceback__))
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


def _run(parsed: argparse.Namespace) -> None:
    options = {option.name: getattr(parsed, option.name) for option in dataclasses.fields(Options)}
    hook = _EnableWithHost(options)
    if not HOST_PACKAGES.isdisjoint(sys.modules):
        enable(**options)
    else:
        sys.meta_path.insert(0, hook)
    try:
        _run_as_main(parsed)
    finally:
        if hook in sys.meta_path:
            sys.meta_path.remove(hook)
            _logger.warning(
                "%s did not import PyLate, colpali-engine or Sentence Transformers with a MultiVectorEncoder, so "
                "nothing was accelerated.",
                parsed.target,
            )


def _run_as_main(parsed: argparse.Namespace) -> None:
    """Run it as a module ``__main__`` that stays when its last line is done, for threads that go on and pickle.

    What is public in runpy takes the module away then, and gives a script's own path to ``sys.argv``.
    """
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__builtins__ = builtins
    if parsed.module:
        runpy._run_module_as_main(parsed.target)  # what python -m calls
        return
    # Absolute, as Python has it: the script may change the directory.
    file = os.path.join(os.getcwd(), parsed.target)
    loader = SourceFileLoader("__main__", file)
    main.__file__, main.__loader__, main.__cached__ = file, loader, None
    exec(loader.source_to_code(loader.get_data(file), file), main.__dict__)


class _EnableWithHost(importlib.abc.MetaPathFinder):
    """Calls ``enable`` as soon as a library is imported that can be accelerated."""

    def __init__(self, options: dict[str, bool | str | None]) -> None:
        self.options = options

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None):
        if name not in HOST_PACKAGES:
            return None
        place = sys.meta_path.index(self)
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            # Whoever asks may only want to know whether there is such a module.
            sys.meta_path.insert(place, self)
        if spec is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_enable(module: ModuleType) -> None:
            execute(module)
            # A host that cannot be imported leaves the finder to another one, and so does one that another is just
            # importing, as PyLate does Sentence Transformers.
            if self in sys.meta_path and brings_host(name) and not _others_begin(name):
                sys.meta_path.remove(self)
                enable(**self.options)

        spec.loader.exec_module = execute_and_enable
        return spec


def _others_begin(name: str) -> bool:
    """Whether a host is being imported besides the one of this name."""
    specs = (getattr(sys.modules.get(other), "__spec__", None) for other in HOST_PACKAGES - {name})
    return any(getattr(spec, "_initializing", False) for spec in specs)


def _parse(arguments: Sequence[str], prog: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Run a training script of PyLate or colpali-engine accelerated, without editing it.",
        usage="%(prog)s [--no-padding-free | --padding-free always] [--compile] [--stock-masking] [--grad-filter auto] "
        "[--ring] [--no-fused-head] (SCRIPT.py | -m MODULE) [ARGS ...]",
        allow_abbrev=False,
    )
    padding = parser.add_mutually_exclusive_group()
    padding.add_argument(
        "--no-padding-free",
        dest="padding_free",
        action="store_false",
        help="encode documents with padding, as stock PyLate does",
    )
    padding.add_argument(
        "--padding-free",
        choices=["always"],
        default=True,
        help="always: without padding also where the model has modules or hooks of your own, which you know to treat "
        "each text by itself",
    )
    parser.add_argument("--compile", action="store_true", help="compile the encoder's layers")
    parser.add_argument(
        "--stock-masking",
        action="store_true",
        help="score masked document tokens with similarity 0, as stock PyLate does",
    )
    parser.add_argument(
        "--grad-filter", choices=["auto"], help="skip the backward of pairs whose gradients are too small to matter"
    )
    parser.add_argument(
        "--ring",
        action="store_true",
        help="with gather_across_devices: pass documents from GPU to GPU instead of gathering all on each",
    )
    parser.add_argument(
        "--no-fused-head",
        dest="fused_head",
        action="store_false",
        help="project and normalise hidden states in two steps",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="run a module, as python -m does")
    # All of it as one: between two of its own argparse would drop a `--`, which is the script's.
    parser.add_argument(
        "words", metavar="SCRIPT.py | MODULE ARGS", nargs=argparse.REMAINDER, help="what to run, and its arguments"
    )
    parsed = parser.parse_args(arguments)
    words = parsed.words[1:] if parsed.words[:1] == ["--"] else parsed.words
    parsed.target, parsed.arguments = (words[0], words[1:]) if words else (None, [])
    return parsed


def _require_module(prog: str, name: str) -> None:
    # python -m searches the working directory first.
    sys.path.insert(0, os.getcwd())
    try:
        missing = importlib.util.find_spec(name) is None
    except ModuleNotFoundError as error:
        # Where another module that its package imports is missing, running it gives the traceback.
        missing = error.name is None or f"{name}.".startswith(f"{error.name}.")
    finally:
        sys.path.pop(0)
    if missing:
        _stop(prog, f"there is no module {name!r}.")


def _stop(prog: str, sentence: str) -> NoReturn:
    print(f"{prog}: {sentence}", file=sys.stderr)
    sys.exit(2)


def _show_log() -> None:
    """Show what was switched on, until the script sets up a log of its own."""
    handler = logging.StreamHandler()
    handler.addFilter(lambda record: not logging.getLogger().handlers)
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    _logger.addHandler(handler)
    _logger.setLevel(logging.INFO)


def _without_launcher(traceback: TracebackType | None) -> TracebackType | None:
    """The traceback from the script's first frame on; all of it where the script never started."""
    rest = traceback
    while rest is not None and _is_launcher(rest.tb_frame):
        rest = rest.tb_next
    return rest or traceback


def _is_launcher(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") in (__name__, "runpy")
