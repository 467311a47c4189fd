"""The command ``fastmaxsim``. ``run``, ``doctor`` and ``compare`` of a script need no extra, all others [recipes]."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import NoReturn

# Options of `compare` that take a value, with a script and with a recipe.
_TAKE_A_VALUE = ("--steps", "--output", "--padding-free", "--grad-filter", "--pooling", "--set", "--sweep")


def main() -> None:
    """Run the command that the command line names."""
    arguments = sys.argv[1:]
    # Without typer, which may be missing and would swallow a `--` that is meant for the script.
    if arguments[:1] == ["run"]:
        run(arguments[1:])
        return
    if isinstance(sys.stdout, io.TextIOWrapper):
        # The terminal's encoding may lack letters of names and paths; stderr already escapes them.
        sys.stdout.reconfigure(errors="replace")
    if arguments[:1] == ["compare"] and is_script(arguments[1:]):
        from pylate_fastmaxsim.comparison.script import compare_script

        compare_script(arguments[1:])
        return
    if arguments == ["doctor"]:
        doctor()
        return
    try:
        app = load_app()
    except ModuleNotFoundError as error:
        _stop_without(error)
    except KeyboardInterrupt:  # while modules are imported, which takes seconds
        print("\nInterrupted.", file=sys.stderr)
        sys.exit(130)
    # For --help only.
    for command in (run, doctor):
        app.command()(command)
    try:
        app()
    except ModuleNotFoundError as error:
        # With [recipes] alone there is no library of models.
        if str(error.name).partition(".")[0] != "sentence_transformers":
            raise
        _stop_without(error)


def load_app():
    """The typer app with all commands but ``run`` and ``doctor``."""
    # Each adds its commands.
    from pylate_fastmaxsim.cli import check, commands, evaluate, recipes  # noqa: F401

    return commands.app


def _stop_without(error: ModuleNotFoundError) -> NoReturn:
    sys.exit(
        f"fastmaxsim: {str(error.name).partition('.')[0]} is missing, which every command but run, doctor and compare of a script "
        'needs: pip install "pylate-fastmaxsim[pylate,recipes]", or without PyLate "pylate-fastmaxsim[multi-vector,recipes]".'
    )


def is_script(arguments: Sequence[str]) -> bool:
    """Whether the words behind ``compare`` name a script or a module, and no recipe.

    Examples
    --------
    >>> from pylate_fastmaxsim.cli import is_script
    >>> is_script(["--steps", "50", "train.py", "--lr", "1e-5"]), is_script(["-m", "my.training"])
    (True, True)
    >>> is_script(["recipes/quickstart.yaml"]), is_script(["--sweep", "batch_size=8", "quickstart"])
    (False, False)
    """
    words = iter(arguments)
    for word in words:
        if word == "-m":
            return True
        if word in _TAKE_A_VALUE:
            next(words, None)
        elif not word.startswith("-"):
            return word.endswith(".py")
    return False


def run(arguments: list[str]) -> None:
    """Run a training script with this package enabled: fastmaxsim run SCRIPT.py ARGS."""
    from pylate_fastmaxsim.integrations.run_script import run_script

    run_script(arguments)


def doctor() -> None:
    """Show versions, devices, what enable() patches, and what falls back and why."""
    from pylate_fastmaxsim.integrations.doctor import report

    print(report())
