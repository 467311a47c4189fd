"""A recipe as YAML."""

from __future__ import annotations

import dataclasses

import yaml

from pylate_fastmaxsim.recipes.config.schema import Recipe


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as YAML that :func:`~pylate_fastmaxsim.recipes.load.load_recipe` reads back to the same recipe."""
    return yaml.safe_dump(dataclasses.asdict(recipe), sort_keys=False, allow_unicode=True)
