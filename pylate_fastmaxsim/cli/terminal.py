"""Arguments, output, errors in one sentence and progress bars that commands share."""

import argparse
import errno
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from rich.console import Console

from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.reporting.progress import Progress
from pylate_fastmaxsim.reporting.table import console

T = TypeVar("T")

BAD_RECIPE = 2
INTERRUPTED = 130

# Brackets and colons in names and paths are neither markup nor emoji.
errors = Console(stderr=True, soft_wrap=True, markup=False, emoji=False, highlight=False)
plain = console()

# What safetensors and other libraries say of a full disk, a quota or a limit of the size of files, and what torch says of any
# file that it cannot write to its end.
_FULL_DISK = re.compile(r"No space left on device|\(os error (27|28|122)\)")
_NOT_WRITTEN = re.compile(r"PytorchStreamWriter failed writing|unexpected pos \d+ vs \d+")


def add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key of the recipe, for example training.max_steps=100; may be given several times",
    )


def add_collection(parser: argparse.ArgumentParser, meaning: str) -> None:
    parser.add_argument("--beir", metavar="FOLDER_OR_NAME", help=f"a collection in BEIR's layout{meaning}")
    parser.add_argument("--split", default="test", help="the split of its judgements (%(default)s)")


def path(text: str) -> Path:
    """A path of the command line. The shell leaves ``~`` in ``--run=~/file`` as it is."""
    return Path(text).expanduser()


def at_least(least: float, number: Callable[[str], float] = int) -> Callable[[str], float]:
    """The type of an argument that is a number with a lower limit."""

    def parse(text: str) -> float:
        try:
            value = number(text)
        except ValueError:
            value = math.nan
        if not value >= least:
            what = "a whole number" if number is int else "a number"
            raise argparse.ArgumentTypeError(f"must be {what} of at least {least}, got {text!r}")
        return value

    return parse


def several(parse_one: Callable[[str], T]) -> Callable[[str], list[T]]:
    """The type of an argument that is a list with commas, without repetitions."""

    def parse(text: str) -> list[T]:
        values = [parse_one(part) for part in text.split(",")]
        if len(set(values)) < len(values):
            raise argparse.ArgumentTypeError(f"must name each once, got {text!r}")
        return values

    return parse


def from_arguments(dataclass: type[T], options: argparse.Namespace, **more: Any) -> T:
    """An instance of a dataclass whose fields are arguments of a command by their names."""
    given = {field.name: getattr(options, field.name) for field in fields(dataclass) if hasattr(options, field.name)}
    return dataclass(**given, **more)


def quiet_libraries() -> None:
    """Hide the progress bars and log lines of other libraries, but on a terminal those of loading data, which takes minutes."""
    import logging

    from datasets import disable_progress_bars
    from transformers.utils import logging as transformers_logging

    if not sys.stderr.isatty():
        disable_progress_bars()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    logging.getLogger("pylate.models.colbert").setLevel(logging.ERROR)
    # It raises as well what it logs.
    logging.getLogger("datasets.packaged_modules.json.json").setLevel(logging.CRITICAL)


def end_with(sentence: str, code: int = 1) -> NoReturn:
    errors.print(sentence, style="red")
    sys.exit(code)


def end_interrupted(kept: str | None = None) -> NoReturn:
    """End the command as one that Ctrl-C has stopped."""
    # Ctrl-C reaches every process of a launcher; only the first reports it.
    if int(os.environ.get("RANK", "0")) == 0:
        errors.print(f"\nInterrupted: {kept}." if kept else "\nInterrupted.")
    sys.exit(INTERRUPTED)


@contextmanager
def report_errors() -> Iterator[None]:
    """End with one sentence after a RecipeError, or after an interrupt before anything was saved."""
    try:
        yield
    except RecipeError as error:
        end_with(f"fastmaxsim: {error}", BAD_RECIPE)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        end_with(f"fastmaxsim: {error.filename} cannot be reached: {error.strerror}.", BAD_RECIPE)
    except KeyboardInterrupt:
        end_interrupted()


@contextmanager
def report_interruption(kept: Callable[[], str], interrupted: str | None = None) -> Iterator[None]:
    """End with one sentence on a full disk or after an interrupt, with a clause that says what is ``kept``.

    ``interrupted`` is another one after an interrupt.
    """
    try:
        yield
    except KeyboardInterrupt:
        end_interrupted(interrupted or kept())
    except RecipeError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            reason = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        elif _FULL_DISK.search(str(error)):
            reason = next(line.strip().rstrip(".") for line in str(error).splitlines() if _FULL_DISK.search(line))
        elif _NOT_WRITTEN.search(str(error)):
            reason = "a file cannot be written to its end, as on a full disk"
        else:
            raise
        end_with(f"\nfastmaxsim: {reason}; {kept()}.")


@contextmanager
def progress_of_tasks() -> Iterator[Callable[..., Callable[[int], object]]]:
    """A bar for each task of a search: ``begin(task, total, done)`` returns what is told how many more are done."""
    with ExitStack() as stack:

        def begin(task: str, total: int | None, done: int = 0) -> Callable[[int], object]:
            return stack.enter_context(Progress(task, total, done)).update

        yield begin
