"""YAML and ``key=value`` overrides to plain values."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import yaml

from pylate_fastmaxsim.recipes.config.schema import Recipe
from pylate_fastmaxsim.recipes.errors import RecipeError


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
