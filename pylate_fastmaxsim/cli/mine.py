"""``fastmaxsim mine``: hard negatives for a recipe's pairs."""

from __future__ import annotations

import argparse

from pylate_fastmaxsim.cli.terminal import add_recipe, add_resume, plain, quiet_libraries, report_interruption
from pylate_fastmaxsim.cli.train import command_to_resume
from pylate_fastmaxsim.recipes.load import load_recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a recipe, its overrides and ``--resume``."""
    add_recipe(parser)
    add_resume(parser, "go on from where mining stopped; --no-resume starts over and replaces its results")


def run(options: argparse.Namespace) -> None:
    """Mine, and print a table of what was written."""
    recipe = load_recipe(options.recipe, options.overrides)
    from accelerate import PartialState

    from pylate_fastmaxsim.recipes.mining.mine import mine
    from pylate_fastmaxsim.recipes.tables import mining_table

    quiet_libraries()
    with report_interruption(
        lambda: f"what is done is kept, and {command_to_resume(options.resume)} goes on from there"
    ):
        result = mine(recipe, options.resume)
    if PartialState().is_main_process:
        plain.print(mining_table(result))
