"""The command ``fastmaxsim``. ``run`` and ``doctor`` need no extra, all others [recipes]."""

from __future__ import annotations

import io
import sys
from typing import NoReturn


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
        # PyLate may be the only package that is missing: Sentence Transformers 6 excludes it.
        if str(error.name).partition(".")[0] != "pylate":
            raise
        _stop_without(error)


def load_app():
    """The typer app with all commands but ``run`` and ``doctor``."""
    # Each adds its commands.
    from pylate_fastmaxsim.cli import commands, recipes  # noqa: F401

    return commands.app


def _stop_without(error: ModuleNotFoundError) -> NoReturn:
    sys.exit(
        f"fastmaxsim: {str(error.name).partition('.')[0]} is missing, which every command but run and doctor needs: "
        'pip install "pylate-fastmaxsim[recipes]".'
    )


def run(arguments: list[str]) -> None:
    """Run a training script with this package enabled: fastmaxsim run SCRIPT.py ARGS."""
    from pylate_fastmaxsim.integrations.run_script import run_script

    run_script(arguments)


def doctor() -> None:
    """Show versions, devices, what enable() patches, and what falls back and why."""
    from pylate_fastmaxsim.integrations.doctor import render

    print(render())
