"""The plugin as the section ``fast`` of a recipe switches it."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict

import pylate_fastmaxsim
from pylate_fastmaxsim.integrations.options import switched_off
from pylate_fastmaxsim.recipes.config.schema import FastSection
from pylate_fastmaxsim.recipes.errors import RecipeError


def reason_against_plugin(fast: FastSection) -> str | None:
    """A clause that says why the plugin stays off; None if :func:`plugin_of` switches it on.

    Raises
    ------
    RecipeError
        The environment variable ``PYLATE_FASTMAXSIM`` says neither on nor off.
    """
    if not fast.enabled:
        return "fast.enabled is false"
    try:
        return switched_off()
    except ValueError as error:
        raise RecipeError(str(error)) from None


def plugin_of(fast: FastSection) -> AbstractContextManager:
    """A context in which the plugin is on, with the options of the recipe, or off."""
    options = asdict(fast)
    return pylate_fastmaxsim.enabled(**options) if options.pop("enabled") else nullcontext()
