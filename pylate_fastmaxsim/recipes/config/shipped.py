"""The recipes that come with the package: in its wheel, or beside it in a checkout."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from pylate_fastmaxsim.recipes.errors import RecipeError

SUFFIXES = (".yaml", ".yml")

_PACKAGE = Path(__file__).parents[2]


def shipped_recipes() -> dict[str, Path]:
    """The files of all recipes by name, in alphabetical order."""
    wheel = _PACKAGE / "shipped_recipes"
    files = (wheel if os.path.isdir(wheel) else _PACKAGE.parent / "recipes").rglob("*.yaml")
    return {file.stem: file for file in sorted(files, key=lambda file: file.stem)}


def describe(file: Path) -> str:
    """The purpose of a recipe: the first line of its comments."""
    with open(file, encoding="utf-8") as lines:
        return next(lines).strip("#: \n")


def is_recipe(name: str) -> bool:
    """True if a word on the command line is a recipe, by its ending or as a shipped one, and not a model."""
    return Path(name).suffix in SUFFIXES or (name in shipped_recipes() and not Path(name).is_dir())


def recipe_file(name: str | Path) -> Path:
    """The file of a recipe that is given by path or by name.

    A file of that name in the working directory, with or without ``.yaml``, goes before a shipped recipe.
    """
    path, shipped = Path(name), shipped_recipes()
    if path.suffix in SUFFIXES:
        if path.stem in shipped and not os.path.exists(path):
            raise RecipeError(
                f"there is no file {path}; to run the recipe of this name that comes with the package, write {path.stem}."
            )
        return path
    for file in (path, *(Path(f"{name}{suffix}") for suffix in SUFFIXES)):
        if os.path.isfile(file):
            return file
    if str(name) not in shipped:
        raise RecipeError(f"there is no recipe {name}; `fastmaxsim recipes` lists those that come with the package.")
    return shipped[str(name)]


def copy_recipe(name: str, folder: Path) -> Path:
    """Copy a shipped recipe into a folder, which is made if it is not there. Returns the new file."""
    shipped = shipped_recipes()
    if name not in shipped:
        raise RecipeError(f"there is no recipe {name}; the package has {', '.join(shipped)}.")
    copy = folder / shipped[name].name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Refuses a file that is there, which may have been edited; so nothing is replaced.
        with open(shipped[name], "rb") as source, open(copy, "xb") as target:
            shutil.copyfileobj(source, target)
    except OSError as error:
        raise RecipeError(f"{copy} cannot be written: {error.strerror}.") from error
    return copy
