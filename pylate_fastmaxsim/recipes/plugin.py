"""Switch the plugin on for a recipe, or say why it is off."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.options import forbidden
from pylate_fastmaxsim.recipes.config.schema import FastSection
from pylate_fastmaxsim.recipes.errors import RecipeError


def plugin_off(fast: FastSection) -> str | None:
    """Why the plugin stays off, or None if :func:`switched` switches it on.

    Raises
    ------
    RecipeError
        The environment variable ``PYLATE_FASTMAXSIM`` says neither on nor off.
    """
    if not fast.enabled:
        return "fast.enabled is false"
    try:
        off = forbidden()
    except ValueError as error:
        raise RecipeError(str(error)) from None
    return f"PYLATE_FASTMAXSIM={os.environ['PYLATE_FASTMAXSIM']}" if off else None


def switched(fast: FastSection) -> AbstractContextManager:
    """A context in which the plugin is on, with the options of the recipe, or off."""
    options = asdict(fast)
    return pylate_fastmaxsim.enabled(**options) if options.pop("enabled") else nullcontext()
