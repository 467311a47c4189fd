"""``fastmaxsim compare RECIPE``: train a recipe stock and accelerated."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from pylate_fastmaxsim.cli.terminal import (
    add_recipe,
    end_with,
    errors,
    plain,
    progress_of_runs,
    quiet_libraries,
    report_interruption,
)
from pylate_fastmaxsim.recipes.load import load_recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a recipe, its overrides, ``--output`` and ``--sweep``."""
    add_recipe(parser)
    parser.add_argument("--output", metavar="DIR", help="folder for the results, in place of the recipe's output_dir")
    parser.add_argument(
        "--sweep",
        metavar="batch_size=N,N,...",
        help="also measure a few steps at each of these batch sizes, until memory runs out",
    )


def run(options: argparse.Namespace) -> None:
    """Compare, print the tables, and write them as JSON, PNG and HTML."""
    # As output_dir of the recipe, so that ~ in --output=~/dir is expanded.
    recipe = load_recipe(options.recipe, options.overrides, options.output)
    from pylate_fastmaxsim.comparison.report import RESULT_FILE, SUFFIXES, show_comparison, write_pictures
    from pylate_fastmaxsim.recipes.comparison.compare import RunFailed, compare, parse_sweep

    batch_sizes = parse_sweep(options.sweep) if options.sweep is not None else []
    result = Path(recipe.output_dir, RESULT_FILE)
    steps = f"the steps of each run are in {result.parent / 'compare'}"
    quiet_libraries()
    try:
        with report_interruption(lambda: steps, "a comparison is not resumed, the same command starts it again"):
            with progress_of_runs() as on_progress:
                comparison = compare(recipe, on_progress, batch_sizes)
            # Before anything that may fail, because measuring took long.
            show_comparison(comparison, plain.print, partial(errors.print, style="yellow"))
            write_pictures(comparison, result)
    except RunFailed as error:
        end_with(f"fastmaxsim: {error}")
    print(*(result.with_suffix(suffix) for suffix in SUFFIXES), sep="\n")
