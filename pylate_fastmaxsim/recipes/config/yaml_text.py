"""YAML and ``key=value`` overrides to plain values; what is wrong with the text is one sentence."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path
from typing import Any

import yaml

from pylate_fastmaxsim.recipes.config.schema import Recipe
from pylate_fastmaxsim.recipes.errors import RecipeError


class _UniqueKeyLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, where YAML would silently keep the last, and what contains itself."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        node = super().compose_node(parent, index)
        # Until all of a node is read it has no end, and until then only an alias inside of it can give it.
        if node.end_mark is None:
            line = node.start_mark.line + 1
            raise RecipeError(f"an alias names what it stands in (line {line}); name something that ends before it.")
        return node

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        # Where a mapping is read and not where it is built: by then `<<` may have brought in keys of another.
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key_node, _ in node.value:
            merges = key_node.tag == "tag:yaml.org,2002:merge"
            key = key_node.value if merges else self.construct_object(key_node, deep=True)
            if not isinstance(key, typing.Hashable):
                continue  # which SafeLoader refuses
            if key in seen:
                raise RecipeError(f"{key!r} is given twice (line {key_node.start_mark.line + 1}); give it once.")
            seen.add(key)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if isinstance(node, yaml.ScalarNode) and not _is_text(node.value):
            problem = f"{node.value!r} has half of a character"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        try:
            return super().construct_object(node, deep)
        except (RecipeError, yaml.YAMLError):
            raise
        except (ValueError, LookupError, AttributeError, OverflowError):  # as 2024-31-12, 0x_ and !!bool maybe
            kind = node.tag.rpartition(":")[2]
            problem = f"{node.value!r} is written like a value of the type {kind} but is none; quote it if it is text"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None


def _is_text(value: str) -> bool:
    """Whether a string can be written to a file; YAML can name half of a character, as \\ud800."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _UniqueKeyLoader)
    except RecipeError as error:
        raise RecipeError(f"{where}: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "it cannot be read"
        raise RecipeError(f"{where}{line}: not valid YAML: {problem}.") from None
    except RecursionError:
        raise RecipeError(f"{where}: its sections are nested deeper than can be read.") from None


def read_yaml(path: Path) -> dict[str, Any]:
    """The sections of a recipe as they stand in a file; of its keys nothing is checked but that each is given once."""
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
        # A copy, since an alias of YAML makes two sections one object.
        values[section] = dict(values[section])
        values = values[section]
    values[last] = _parse_yaml(text, f"--set {dotted}")
