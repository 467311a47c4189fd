"""The command ``fastmaxsim``. ``run`` and ``doctor`` need PyLate only, ``train`` and ``compare`` the [recipes] extra."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command that the command line names."""
    try:
        from pylate_fastmaxsim.recipes.commands import app
    except ModuleNotFoundError as missing:
        _without_recipes(sys.argv[1:], missing)
    else:
        app()


def run(arguments: list[str]) -> None:
    """Run a training script with the plugin switched on."""
    from pylate_fastmaxsim.integrations.launcher import run_script

    run_script(arguments)


def doctor() -> None:
    """Print versions, device, what would be patched and what would fall back."""
    from pylate_fastmaxsim.integrations.doctor import render

    print(render())


def _without_recipes(arguments: list[str], missing: ModuleNotFoundError) -> None:
    """What works without the [recipes] extra, and for the rest what to install."""
    if arguments[:1] == ["run"]:
        run(arguments[1:])
    elif arguments == ["doctor"]:
        doctor()
    else:
        sys.exit(
            f"fastmaxsim: {missing.name} is missing, which every command but run and doctor needs: "
            'pip install "pylate-fastmaxsim[recipes]".'
        )


if __name__ == "__main__":
    main()
