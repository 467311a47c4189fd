"""Plain values to the sections of a recipe. Each key is checked by itself, and against the selector of its section."""

import dataclasses
import math
import operator
import os
import types
import typing
from contextlib import suppress
from typing import Any, Literal

from pylate_fastmaxsim._checks import suggestion
from pylate_fastmaxsim.recipes.errors import RecipeError

_TYPE_NAMES = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    list[str]: "a list of at least one string",
    list[float]: "a list of at least one number",
    dict[str, Any]: "a mapping",
}
_LIMITS = {
    "minimum": ("of at least", operator.ge),
    "above": ("greater than", operator.gt),
    "maximum": ("and at most", operator.le),
}

# Limits of a key by name; None for none.
Limits = dict[str, float | None]


def build(section: type, values: Any, path: str, whose: str = "") -> Any:
    """An instance of a schema dataclass from parsed YAML. ``whose`` is what an error says of a recipe without a key."""
    hints, fields = typing.get_type_hints(section), {field.name: field for field in dataclasses.fields(section)}
    others = next((name for name, field in fields.items() if field.metadata.get("others")), None)
    fields.pop(others, None)
    if not isinstance(values, dict):
        raise RecipeError(f"{path} must be a section with the keys {', '.join(fields)}, got {values!r}.")
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        dotted = f"{path}.{name}" if path else name
        if name not in fields and others is not None:
            arguments.setdefault(others, {})[str(name)] = value
            continue
        if name not in fields:
            hint = suggestion(str(name), fields, "allowed here:")
            raise RecipeError(f"{dotted} is not a key of a recipe{whose}; {hint}")
        options = fields[name].metadata
        limits, word = options.get("limits", {}), options.get("null")
        if word is not None and isinstance(value, str) and value != word:
            raise RecipeError(f"{dotted} must be {word} or {_allowed(hints[name], limits)}, got {value!r}.")
        value = None if value == word else convert(value, hints[name], limits, dotted, whose)
        is_path = options.get("path") and value is not None
        arguments[name] = _expanded(value, dotted, options["on_hub"]) if is_path else value
    for name, field in fields.items():
        if name not in values and field.default is field.default_factory is dataclasses.MISSING:
            dotted = f"{path}.{name}" if path else name
            raise RecipeError(f"{dotted} is missing; it must be {_allowed(hints[name], {})}.")
    built = section(**arguments)
    if selector := getattr(section, "SELECTOR", None):
        _require_selected(built, path, selector, typing.get_args(hints[selector]))
    return built


def _expanded(paths: str | list[str], key: str, on_hub: str | None) -> str | list[str]:
    """Paths with the home directory for a leading ``~``."""
    if isinstance(paths, list):
        return [_expanded(path, key, on_hub) for path in paths]
    if not paths:  # for example of a shell variable that is not set
        raise RecipeError(f"{key} must not be empty.")
    path = os.path.expanduser(paths)
    if on_hub is not None and os.path.isfile(path):
        raise RecipeError(f"{key} must be {on_hub} on the Hub or a directory, but {path} is a file.")
    return path


def _require_selected(section: Any, path: str, selector: str, values: tuple[str, ...]) -> None:
    """Refuse keys that do not apply to the value of a section's selector, and require those that it needs."""
    selected = getattr(section, selector)
    for field in dataclasses.fields(section):
        only, missing = field.metadata.get("only"), getattr(section, field.name) == field.default
        if only and selected not in only and not missing:
            others = " and ".join(value for value in values if value in only)
            raise RecipeError(f"{path}.{field.name} does not apply to {path}.{selector} {selected}, but to {others}.")
        if missing and field.metadata.get("required") and selected in only:
            raise RecipeError(f"{path}.{field.name} is missing; {path}.{selector} {selected} needs it.")


def convert(value: Any, hint: Any, limits: Limits, path: str, whose: str = "") -> Any:
    """``value``, if ``hint`` allows its type. A number such as 1e-5, which YAML reads as a string, becomes a float."""
    options = alternatives(hint)
    if value is None and type(None) in options:
        return None
    kinds = [option for option in options if option is not type(None)]
    if dataclasses.is_dataclass(kinds[0]):
        return build(kinds[0], value, path, whose)
    item = next((typing.get_args(kind)[0] for kind in kinds if typing.get_origin(kind) is list), None)
    if item is not None and isinstance(value, list) and value:
        return [convert(each, item, limits, f"{path}[{place}]", whose) for place, each in enumerate(value)]
    if float in kinds and str not in kinds and isinstance(value, (int, str)) and not isinstance(value, bool):
        with suppress(ValueError, OverflowError):
            value = float(value)
    within = (holds(value, limits[name]) for name, (_, holds) in _LIMITS.items() if limits.get(name) is not None)
    if not any(_is_a(value, kind) for kind in kinds) or not all(within):
        raise RecipeError(f"{path} must be {_allowed(hint, limits)}, got {value!r}.")
    return value


def section_of(kind: Any) -> type | None:
    """The dataclass of a key that is a section or a list of sections; None of other keys."""
    inner = typing.get_args(kind)[0] if typing.get_origin(kind) is list else kind
    return inner if dataclasses.is_dataclass(inner) else None


def alternatives(hint: Any) -> tuple[Any, ...]:
    """The types of a union, or the type itself."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _is_a(value: Any, kind: Any) -> bool:
    if typing.get_origin(kind) is Literal:
        return value in typing.get_args(kind)
    if typing.get_origin(kind) is list:
        return False
    if kind == dict[str, Any]:
        return isinstance(value, dict) and all(isinstance(item, str) for item in value)
    if kind is float:
        return isinstance(value, float) and math.isfinite(value)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _allowed(hint: Any, limits: Limits) -> str:
    names = []
    for option in alternatives(hint):
        if option is type(None):
            names.append("null")
        elif typing.get_origin(option) is Literal:
            names.append("one of " + ", ".join(typing.get_args(option)))
        elif section_of(option) is not None:
            what = "a section" if dataclasses.is_dataclass(option) else "a list of sections"
            option = section_of(option)
            names.append(f"{what} with the keys " + ", ".join(field.name for field in dataclasses.fields(option)))
        else:
            bounds = [
                f" {words} {limits[name]}" for name, (words, _) in _LIMITS.items() if limits.get(name) is not None
            ]
            names.append(_TYPE_NAMES[option] + "".join(bounds))
    return " or ".join(names)
