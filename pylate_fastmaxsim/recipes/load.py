"""A recipe as YAML: find its file, read it and ``key=value`` overrides to a checked :class:`Recipe`, and write it down.

Shipped recipes come with the package: in its wheel, or beside it in a checkout.
"""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from pylate_fastmaxsim._checks import suggestion
from pylate_fastmaxsim.recipes.config.kinds import build_recipe
from pylate_fastmaxsim.recipes.config.schema import Recipe
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.trainer_arguments import with_checked_arguments
from pylate_fastmaxsim.recipes.validate import check

SUFFIXES = (".yaml", ".yml")

_PACKAGE = Path(__file__).parents[1]


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
        recipe = with_checked_arguments(build_recipe(values))
        check(recipe)
    except OSError as error:  # a path without permission, or with a name that is too long
        raise RecipeError(f"{path}: {error.filename} cannot be reached: {error.strerror}.") from None
    return recipe


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as YAML that :func:`load_recipe` reads back to the same recipe."""
    return to_yaml(plain_values(recipe))


def to_yaml(values: dict[str, Any]) -> str:
    """Plain values as YAML, in their order."""
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def plain_values(section: Any, only_set: bool = False) -> dict[str, Any]:
    """A section as plain values. With ``only_set`` without keys that have their defaults, but with those that say its kind."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(section):
        value, factory = getattr(section, field.name), field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        if field.metadata.get("others"):
            values |= value
            continue
        if dataclasses.is_dataclass(value):
            value = plain_values(value, only_set)
            if only_set and not value:
                continue
        elif only_set and value == default and field.name != getattr(section, "SELECTOR", "kind"):
            continue
        elif isinstance(value, list):
            value = [plain_values(each, only_set) if dataclasses.is_dataclass(each) else each for each in value]
        values[field.name] = value
    return values


class _UniqueKeyLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice. YAML would silently keep the last."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise RecipeError(f"{key.value!r} is given twice (line {key.start_mark.line + 1}); give it once.")
            seen.add(key.value)
        return node


def _parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _UniqueKeyLoader)
    except RecipeError as error:
        raise RecipeError(f"{where}: {error}") from None
    except Exception as error:  # PyYAML also raises errors of Python, for example for the date 2024-31-12
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise RecipeError(f"{where}{line}: not valid YAML: {getattr(error, 'problem', None) or error}.") from None


def read_yaml(path: Path) -> dict[str, Any]:
    """The sections of a recipe as they stand in a file. Keys are not checked, except that none may be given twice."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise RecipeError(f"Cannot read the recipe {path}: {reason}.") from None
    values = _parse_yaml(text, str(path))
    if not isinstance(values, dict):
        sections = ", ".join(field.name for field in dataclasses.fields(Recipe))
        raise RecipeError(f"{path}: a recipe is a mapping with the keys {sections}.")
    return values


def apply_override(values: dict[str, Any], override: str) -> None:
    """Set ``a.b=value`` in the sections of a recipe, the value in YAML."""
    dotted, equals, text = override.partition("=")
    *sections, last = dotted.strip().split(".")
    if not equals or not all([*sections, last]):
        raise RecipeError(f"--set {override}: write it as key=value, for example training.max_steps=100.")
    for section in sections:
        if values.get(section) is None:
            values[section] = {}
        if not isinstance(values[section], dict):
            raise RecipeError(f"--set {override}: {section} is not a section.")
        # A copy: an alias in YAML makes two sections one object.
        values[section] = dict(values[section])
        values = values[section]
    values[last] = _parse_yaml(text, f"--set {dotted}")


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
    return shipped_recipe(str(name))


def shipped_recipe(name: str) -> Path:
    """The file of a recipe that comes with the package."""
    shipped = shipped_recipes()
    if name not in shipped:
        raise RecipeError(f"there is no recipe {name}; {suggestion(name, shipped, 'the package has')}")
    return shipped[name]


def copy_recipe(name: str, folder: Path) -> Path:
    """Copy a shipped recipe into a folder, which is made if it is not there. Returns the new file."""
    file = shipped_recipe(name)
    copy = folder / file.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(copy, "xb") as target:  # refuses a file that is there, which may have been edited
            target.write(file.read_bytes())
    except OSError as error:
        raise RecipeError(f"{copy} cannot be written: {error.strerror}.") from error
    return copy
