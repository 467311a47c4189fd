"""``fastmaxsim warmup``: compile the kernels of a recipe ahead of time."""

from __future__ import annotations

import argparse

from rich.console import Console

from pylate_fastmaxsim.cli.terminal import add_recipe, plain, quiet_libraries
from pylate_fastmaxsim.recipes.load import load_recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a recipe and its overrides."""
    add_recipe(parser)


def run(options: argparse.Namespace) -> None:
    """Compile, and print what took how long."""
    recipe = load_recipe(options.recipe, options.overrides)
    from pylate_fastmaxsim.precompile.recipe import reason_against_warmup, warm_up

    if reason := reason_against_warmup(recipe):
        print(reason)
        return
    quiet_libraries()
    with Console(stderr=True, emoji=False).status("compiling, then training two steps on each size of batch"):
        warmed = warm_up(recipe)
    plain.print(warmed.table(recipe.name))
    print(warmed.counts())
