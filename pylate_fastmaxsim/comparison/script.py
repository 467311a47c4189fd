"""``fastmaxsim compare train.py``: a training script as it is, for some steps, stock and accelerated by turns."""

from __future__ import annotations

import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from pylate_fastmaxsim.comparison.ranks import Ranks
from pylate_fastmaxsim.comparison.report import (
    RESULT_FILE,
    SUFFIXES,
    show_comparison,
    write_comparison,
    write_pictures,
)
from pylate_fastmaxsim.comparison.script_child import FAILURE, script_comparison_parser
from pylate_fastmaxsim.comparison.turns import Child, ChildFailed, python, take_turns
from pylate_fastmaxsim.comparison.verdict import FAST, MODES, summarize_turns
from pylate_fastmaxsim.files.replace import require_replaceable
from pylate_fastmaxsim.integrations.run_script import parse
from pylate_fastmaxsim.reporting.numbers import without_nan

INTERRUPTED = 130
# How many characters at the end of a log are repeated where a script fails without a traceback.
_LOG_END = 2000

# To the beginning of a terminal's line, and what is written there is gone.
_CLEAR = "\r\x1b[K"


def compare_script(arguments: Sequence[str], prog: str = "fastmaxsim compare") -> None:
    """Run a training script for some steps, stock and with ``enable``, and report time, memory and loss side by side.

    Both are processes of their own that take their steps by turns, in short blocks. They save and evaluate nothing, and
    end behind the last step.

    Parameters
    ----------
    arguments
        ``--steps``, ``--output`` and the options of ``enable``, then ``SCRIPT.py`` or ``-m MODULE``. What follows belongs
        to the script.
    prog
        The command's name.

    Raises
    ------
    SystemExit
        If the script fails, with its exit code and its traceback; 2 if there is nothing to run; 130 after an interrupt.
    """
    parser = script_comparison_parser(prog)
    options, words, as_module = parse(parser, arguments)
    if not as_module and not Path(words[0]).exists():
        parser.error(f"there is no script {words[0]}.")
    steps, output = options.pop("steps"), Path(options.pop("output")).expanduser()
    try:
        ranks = Ranks()
        output.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=output).close()  # can be written into
        for suffix in SUFFIXES:
            require_replaceable((output / RESULT_FILE).with_suffix(suffix))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory(prefix="fastmaxsim-compare-") as scratch:
        children = {mode: child_of(mode, Path(scratch), output, arguments, ranks) for mode in MODES}
        try:
            with _show_progress(ranks) as on_wait:
                turns = take_turns(children, of=steps, on_wait=on_wait, gather=ranks.gather)
        except ChildFailed as failed:
            _exit_as_the_script(failed, Path(scratch))
        except KeyboardInterrupt:
            print("\nInterrupted.", file=sys.stderr)
            sys.exit(INTERRUPTED)
    if ranks.rank == 0:
        given = {name: str(value) for name, value in options.items()}
        command = {"name": Path(words[0]).name, "command": shlex.join(words), "processes": ranks.size, "steps": steps}
        try:
            _report({"recipe": command | {"options": given}, **summarize_turns(turns)}, output / RESULT_FILE)
        except OSError as error:
            sys.exit(f"fastmaxsim: the result cannot be written to {output}: {error.strerror}.")


def child_of(mode: str, scratch: Path, output: Path, arguments: Sequence[str], ranks: Ranks) -> Child:
    """The process of one of the two runs; its log goes to ``output``, all else that it writes to ``scratch``."""
    folder = scratch / mode
    folder.mkdir()
    program = python("from pylate_fastmaxsim.comparison.script_child import main; main()")
    # Else the order of a set of texts, and what a script draws from it, is another one in each process.
    environment = {"PYTHONHASHSEED": "0"} | ranks.environment()
    log = output / (f"{mode}.log" if ranks.size == 1 else f"{mode}-{ranks.rank}.log")
    return Child([*program, mode, str(folder), *arguments], log, environment)


@contextmanager
def _show_progress(ranks: Ranks) -> Iterator[Callable[[str], None]]:
    """Show on a terminal which process has its turn; a function that also sees whether another rank is out of memory."""
    begun = time.perf_counter()
    shown = ranks.rank == 0 and sys.stderr.isatty()

    def wait(name: str) -> None:
        ranks.require_memory_elsewhere()
        if shown:
            print(f"{_CLEAR}{time.perf_counter() - begun:.0f} s: {name}", end="", file=sys.stderr, flush=True)

    try:
        yield wait
    finally:
        if shown:
            print(_CLEAR, end="", file=sys.stderr, flush=True)


def _exit_as_the_script(failed: ChildFailed, scratch: Path) -> NoReturn:
    """Exit with the traceback and the exit code of the script; of the stock run with nothing else."""
    if failed.name == FAST:
        print("fastmaxsim: the run with this package fails; stock had not failed so far:", file=sys.stderr)
    file = scratch / failed.name / FAILURE
    said = file.read_text(encoding="utf-8") if file.exists() else f"fastmaxsim: {failed}\n"
    # A script that exits by a code has said why, as argparse does.
    sys.stderr.write(said or failed.log.read_text(encoding="utf-8", errors="replace")[-_LOG_END:])
    # Without a result 0 would say that there is one.
    sys.exit(failed.returncode or 1 if failed.returncode >= 0 else 128 - failed.returncode)


def _report(comparison: dict[str, Any], file: Path) -> None:
    """Print and write what was measured."""
    comparison = without_nan(comparison)
    try:
        from rich.console import Console

        show = Console(markup=False, emoji=False).print
    except ModuleNotFoundError:
        show = print
    show_comparison(comparison, show, partial(print, file=sys.stderr))
    write_comparison(comparison, file)
    try:
        write_pictures(comparison, file)
    except ModuleNotFoundError as error:
        print(f"There is no PNG and no HTML: {str(error.name).partition('.')[0]} is missing.", file=sys.stderr)
        print(file)
    else:
        print(*(file.with_suffix(suffix) for suffix in SUFFIXES), sep="\n")
