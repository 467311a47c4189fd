"""Read a recipe: YAML and ``key=value`` overrides to a checked :class:`Recipe`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pylate_fastmaxsim.recipes.config.kinds import build_recipe
from pylate_fastmaxsim.recipes.config.schema import Recipe
from pylate_fastmaxsim.recipes.config.shipped import recipe_file
from pylate_fastmaxsim.recipes.config.yaml_text import apply_override, read_yaml
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.validate import check


def load_recipe(path: str | Path, overrides: Sequence[str] = (), output_dir: str | None = None) -> Recipe:
    """Read and check a recipe. Nothing is written or downloaded.

    Parameters
    ----------
    path
        YAML file with the sections of :class:`Recipe`, or the name of a recipe that comes with the package. The stem of
        the file is the default of ``name``.
    overrides
        ``a.b=value`` items, the value in YAML, applied in order before the recipe is checked.
    output_dir
        Replaces that of the recipe. Not parsed as YAML.

    Raises
    ------
    RecipeError
        With one sentence that names the key and what is allowed.

    Examples
    --------
    >>> import tempfile, pathlib
    >>> from pylate_fastmaxsim.recipes.load import load_recipe
    >>> text = "{output_dir: runs/a, model: {name_or_path: some/model}, data: {source: hub, name: some/data}}"
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = pathlib.Path(directory, "a.yaml")
    ...     _ = path.write_text(text)
    ...     load_recipe(path, ["training.learning_rate=3e-6"]).training.learning_rate
    3e-06
    """
    path = recipe_file(path)
    values = read_yaml(path)
    for override in overrides:
        apply_override(values, override)
    if output_dir is not None:
        values["output_dir"] = output_dir
    values.setdefault("name", path.stem)
    try:
        recipe = build_recipe(values)
        check(recipe)
    except OSError as error:  # a path without permission, or with a name that is too long
        raise RecipeError(f"{path}: {error.filename} cannot be reached: {error.strerror}.") from None
    return recipe
