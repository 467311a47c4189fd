"""A JSON schema of recipes, with which editors complete and check them."""

import dataclasses
import inspect
import typing
from typing import Any, Literal

from pylate_fastmaxsim.recipes.config.kinds import RECIPES
from pylate_fastmaxsim.recipes.config.parse import alternatives, section_of
from pylate_fastmaxsim.recipes.trainer_arguments import REFUSED, simple_types

_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null", dict: "object"}
_LIMITS = {"minimum": "minimum", "above": "exclusiveMinimum", "maximum": "maximum"}

Schema = dict[str, Any]


def json_schema() -> Schema:
    """The schema of recipes of all kinds: ``model.kind`` decides which sections a recipe has."""
    from sentence_transformers import SentenceTransformerTrainingArguments  # takes seconds

    sections: dict[str, Schema] = {}
    more = {
        name: _of_type(hint, {}, sections)
        for name, (hint, _) in simple_types(SentenceTransformerTrainingArguments).items()
        if name not in REFUSED
    }
    kinds = []
    for kind, recipe in RECIPES.items():
        has_kind = {"properties": {"kind": {"const": kind}}, "required": [] if kind == "colbert" else ["kind"]}
        then = _section(recipe, sections)
        kinds.append({"if": {"properties": {"model": has_kind}}, "then": then})
    for section in sections.values():
        if "learning_rate" in section["properties"]:
            section["properties"] = more | section["properties"]
    draft = "https://json-schema.org/draft/2020-12/schema"
    return {
        "$schema": draft,
        "title": "Recipe of pylate-fastmaxsim",
        "type": "object",
        "allOf": kinds,
        "$defs": sections,
    }


def _section(section: type, sections: dict[str, Schema]) -> Schema:
    """A reference to the schema of a dataclass, which is added to ``sections``."""
    name = section.__name__
    if name not in sections:
        sections[name] = made = {"type": "object", "additionalProperties": False}
        made["description"] = (inspect.getdoc(section) or name).partition("\n")[0]
        hints, keys = typing.get_type_hints(section), dataclasses.fields(section)
        keys = [key for key in keys if not key.metadata.get("others")]
        made["properties"] = {key.name: _key(key, hints[key.name], sections) for key in keys}
        required = [key.name for key in keys if key.default is key.default_factory is dataclasses.MISSING]
        made["required"] = [key for key in required if key != "name" or section not in RECIPES.values()]  # the file's
    return {"$ref": f"#/$defs/{name}"}


def _key(key: dataclasses.Field, hint: Any, sections: dict[str, Schema]) -> Schema:
    made = _of_type(hint, key.metadata.get("limits", {}), sections)
    if word := key.metadata.get("null"):
        made["anyOf"].append({"const": word})
    if "meaning" in key.metadata:
        unit = key.metadata.get("unit")
        made["description"] = key.metadata["meaning"] + (f" ({unit})" if unit else "")
    if key.default not in (dataclasses.MISSING, None):
        made["default"] = key.default
    return made


def _of_type(hint: Any, limits: dict[str, float | None], sections: dict[str, Schema]) -> Schema:
    found = []
    bounds = {word: limits[name] for name, word in _LIMITS.items() if limits.get(name) is not None}
    for option in alternatives(hint):
        origin, section = typing.get_origin(option), section_of(option)
        if origin is Literal:
            found.append({"enum": list(typing.get_args(option))})
        elif origin is list:
            item = typing.get_args(option)[0]
            found.append({"type": "array", "items": _of_type(item, limits, sections)})
        elif section is not None:
            found.append(_section(section, sections))
        else:
            found.append({"type": _TYPES[origin or option]} | (bounds if option in (int, float) else {}))
    return {"anyOf": found} if len(found) > 1 else found[0]
