"""What differs between kinds of model: each package has it in its modules ``text``, ``sparse`` and ``visual``."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from pylate_fastmaxsim.recipes.config.schema import ModelSection
from pylate_fastmaxsim.recipes.errors import RecipeError


def backend(model: ModelSection, package: str) -> ModuleType:
    """The module ``text``, ``sparse`` or ``visual`` of a package, by the kind of model. They have the same functions.

    Raises
    ------
    RecipeError
        The model retrieves pages, and colpali-engine is not installed.

    Examples
    --------
    >>> from pylate_fastmaxsim.recipes.backend import backend
    >>> from pylate_fastmaxsim.recipes.config.schema import ModelSection
    >>> backend(ModelSection(kind="colbert"), "pylate_fastmaxsim.recipes.training").HOST
    'PyLate'
    """
    if not model.visual:
        return import_module(f"{package}.{'sparse' if model.kind == 'splade' else 'text'}")
    try:
        return import_module(f"{package}.visual")
    except ModuleNotFoundError as error:
        raise RecipeError(
            f'model.kind {model.kind} needs colpali-engine: pip install "pylate-fastmaxsim[recipes,colpali]" ({error}).'
        ) from error
