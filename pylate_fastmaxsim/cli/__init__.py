"""The command ``fastmaxsim``. ``run`` and ``doctor`` need no extra, all others [recipes]."""

from __future__ import annotations

import io
import sys
from typing import NoReturn


def main() -> None:
    """Run the command that the command line names."""
    arguments = sys.argv[1:]
    # Not through typer, which may be missing and would keep `--` from the script.
    if arguments[:1] == ["run"]:
        run(arguments[1:])
        return
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Names and paths may have letters that the terminal or the log does not; stderr writes those in another way.
        sys.stdout.reconfigure(errors="replace")
    if arguments == ["doctor"]:
        doctor()
        return
    try:
        from pylate_fastmaxsim.cli.commands import app
    except ModuleNotFoundError as error:
        _stop_without(error)
    except KeyboardInterrupt:  # in the seconds that imports take
        print("\nInterrupted.", file=sys.stderr)
        sys.exit(130)
    # For --help: above they were reached without typer.
    for command in (run, doctor):
        app.command()(command)
    try:
        app()
    except ModuleNotFoundError as error:
        # All else that recipes need may have come with others, as with Sentence Transformers 6, which excludes PyLate.
        if str(error.name).partition(".")[0] != "pylate":
            raise
        _stop_without(error)


def _stop_without(error: ModuleNotFoundError) -> NoReturn:
    sys.exit(
        f"fastmaxsim: {str(error.name).partition('.')[0]} is missing, which every command but run and doctor needs: "
        'pip install "pylate-fastmaxsim[recipes]".'
    )


def run(arguments: list[str]) -> None:
    """Run somebody's training script with this package switched on: fastmaxsim run SCRIPT.py ARGS."""
    from pylate_fastmaxsim.integrations.run_script import run_script

    run_script(arguments)


def doctor() -> None:
    """Show versions, devices, what enable() patches here, and what falls back and why."""
    from pylate_fastmaxsim.integrations.doctor import render

    print(render())
