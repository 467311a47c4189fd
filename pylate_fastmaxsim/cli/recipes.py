"""``fastmaxsim recipes``: list the recipes that come with the package, and copy one."""

from __future__ import annotations

import argparse

from pylate_fastmaxsim.cli.terminal import path
from pylate_fastmaxsim.recipes.config.shipped import copy_recipe, describe, shipped_recipes
from pylate_fastmaxsim.recipes.errors import RecipeError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``copy NAME [FOLDER]``."""
    parser.add_argument("copy", nargs="?", choices=["copy"], metavar="copy", help="copy a recipe in place of the list")
    parser.add_argument("name", nargs="?", metavar="NAME", help="its name")
    parser.add_argument("folder", nargs="?", metavar="FOLDER", type=path, default=path(""), help="where to (here)")


def run(options: argparse.Namespace) -> None:
    """List or copy."""
    files = shipped_recipes()
    if options.copy:
        if options.name is None:
            raise RecipeError(f"recipes copy needs the name of a recipe; the package has {', '.join(files)}.")
        print(copy_recipe(options.name, options.folder))
        return
    width = max(map(len, files))
    for name, file in files.items():
        print(f"{name:{width}}  {describe(file)}")
