"""``fastmaxsim recipes``: list the recipes that come with the package, and copy one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pylate_fastmaxsim.cli.commands import app, one_sentence_instead_of_a_traceback
from pylate_fastmaxsim.recipes.config.shipped import copy_recipe, describe, shipped_recipes

recipes = typer.Typer(add_completion=False)
app.add_typer(recipes, name="recipes")


@recipes.callback(invoke_without_command=True)
def list_(context: typer.Context) -> None:
    """List the recipes that come with the package. Every command takes them by name."""
    if context.invoked_subcommand is not None:
        return
    files = shipped_recipes()
    width = max(map(len, files))
    for name, file in files.items():
        typer.echo(f"{name:{width}}  {describe(file)}")


@recipes.command()
def copy(
    name: Annotated[str, typer.Argument(help="Its name.", show_default=False)],
    folder: Annotated[Path, typer.Argument(help="Where to.")] = Path(),
) -> None:
    """Copy a recipe, to edit it. It then goes before the original, in the folder where it lies."""
    with one_sentence_instead_of_a_traceback():
        typer.echo(str(copy_recipe(name, folder.expanduser())))
