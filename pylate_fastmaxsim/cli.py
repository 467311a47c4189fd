"""The command ``fastmaxsim``. ``run`` and ``doctor`` need no extra, all others [recipes]."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command that the command line names."""
    arguments = sys.argv[1:]
    # Not through typer, which may be missing and would keep `--` from the script.
    if arguments[:1] == ["run"]:
        run(arguments[1:])
    elif arguments == ["doctor"]:
        doctor()
    else:
        try:
            from pylate_fastmaxsim.recipes.commands import app
        except ModuleNotFoundError as error:
            sys.exit(
                f"fastmaxsim: {error.name} is missing, which every command but run and doctor needs: "
                'pip install "pylate-fastmaxsim[recipes]".'
            )
        app()


def run(arguments: list[str]) -> None:
    """Run a PyLate or colpali-engine training script with the plugin switched on: fastmaxsim run SCRIPT.py ARGS."""
    from pylate_fastmaxsim.integrations.launcher import run_script

    run_script(arguments)


def doctor() -> None:
    """Show versions, device, what would be patched and what would fall back, and why."""
    from pylate_fastmaxsim.integrations.doctor import render

    print(render())


if __name__ == "__main__":
    main()
