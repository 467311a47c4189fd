"""Plain values to the sections of a recipe. Each key is checked by itself: its name, type and limits."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import types
import typing
from contextlib import suppress
from typing import Any, Literal

from pylate_fastmaxsim.recipes.errors import RecipeError

_TYPE_NAMES = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    list[str]: "a list of at least one string",
    dict[str, Any]: "a mapping",
}

# The smallest and the largest value of a key.
Limits = tuple[float | None, float | None]
NO_LIMITS: Limits = (None, None)


def build(section: type, values: Any, path: str) -> Any:
    """An instance of a schema dataclass from parsed YAML."""
    if not isinstance(values, dict):
        names = ", ".join(field.name for field in dataclasses.fields(section))
        raise RecipeError(f"{path} must be a section with the keys {names}, got {values!r}.")
    hints = typing.get_type_hints(section)
    fields = {field.name: field for field in dataclasses.fields(section)}
    for name in values:
        if name not in fields:
            raise RecipeError(_unknown_key(name, path, list(fields)))
    arguments = {}
    for name, field in fields.items():
        dotted = f"{path}.{name}" if path else name
        if name in values:
            limits = field.metadata.get("minimum"), field.metadata.get("maximum")
            word = field.metadata.get("null")
            if word is not None and isinstance(values[name], str) and values[name] != word:
                raise RecipeError(f"{dotted} must be {word} or {_allowed(hints[name], limits)}, got {values[name]!r}.")
            value = None if values[name] == word else _convert(values[name], hints[name], limits, dotted)
            arguments[name] = _expanded(value, dotted) if field.metadata.get("path") else value
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise RecipeError(f"{dotted} is missing; it must be {_allowed(hints[name], NO_LIMITS)}.")
    return section(**arguments)


def _expanded(paths: str | list[str] | None, key: str) -> str | list[str] | None:
    """``paths`` with the home directory for a leading ``~``."""
    if paths is None:
        return None
    if "" in (paths if isinstance(paths, list) else [paths]):  # for example of a shell variable that is not set
        raise RecipeError(f"{key} must not be empty.")
    return [os.path.expanduser(path) for path in paths] if isinstance(paths, list) else os.path.expanduser(paths)


def _unknown_key(name: Any, path: str, known: list[str]) -> str:
    dotted = f"{path}.{name}" if path else name
    close = difflib.get_close_matches(str(name), known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"allowed here: {', '.join(known)}."
    return f"{dotted} is not a key of a recipe; {hint}"


def _convert(value: Any, hint: Any, limits: Limits, path: str) -> Any:
    """``value``, if ``hint`` allows its type. A number such as 1e-5, which YAML reads as a string, becomes a float."""
    options = _alternatives(hint)
    if value is None and type(None) in options:
        return None
    (kind,) = [option for option in options if option is not type(None)]
    if dataclasses.is_dataclass(kind):
        return build(kind, value, path)
    if kind is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        with suppress(ValueError, OverflowError):
            value = float(value)
    if not _is_a(value, kind) or not _is_within(value, limits):
        raise RecipeError(f"{path} must be {_allowed(hint, limits)}, got {value!r}.")
    return value


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """The types of a union, or the type itself."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _is_within(value: Any, limits: Limits) -> bool:
    minimum, maximum = limits
    return (minimum is None or value >= minimum) and (maximum is None or value <= maximum)


def _is_a(value: Any, kind: Any) -> bool:
    if typing.get_origin(kind) is Literal:
        return value in typing.get_args(kind)
    if kind == list[str]:
        return isinstance(value, list) and bool(value) and all(isinstance(item, str) for item in value)
    if kind == dict[str, Any]:
        return isinstance(value, dict) and all(isinstance(item, str) for item in value)
    if kind is float:
        return isinstance(value, float) and math.isfinite(value)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _allowed(hint: Any, limits: Limits) -> str:
    minimum, maximum = limits
    names = []
    for option in _alternatives(hint):
        if option is type(None):
            names.append("null")
        elif typing.get_origin(option) is Literal:
            names.append("one of " + ", ".join(typing.get_args(option)))
        elif dataclasses.is_dataclass(option):
            names.append("a section with the keys " + ", ".join(field.name for field in dataclasses.fields(option)))
        else:
            bounds = f" of at least {minimum}" if minimum is not None else ""
            bounds += f" and at most {maximum}" if maximum is not None else ""
            names.append(_TYPE_NAMES[option] + bounds)
    return " or ".join(names)
