"""What differs between kinds of model: each package has a module for each of them."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import sentence_transformers

from pylate_fastmaxsim.recipes.config.schema import ModelSection
from pylate_fastmaxsim.recipes.errors import RecipeError

MODULES = {
    "colbert": "text",
    "multi_vector": "multi_vector",
    "splade": "sparse",
    "colpali": "visual",
    "colqwen2": "visual",
}
# The library that a kind needs, and the extras that bring it.
NEEDED = {"text": ("PyLate", "pylate,recipes"), "visual": ("colpali-engine", "pylate,recipes,colpali")}


def backend(model: ModelSection, package: str) -> ModuleType:
    """The module of a package for a kind of model. Those of all kinds have the same functions.

    Raises
    ------
    RecipeError
        The library that trains this kind of model is not installed, or in an earlier release.

    Examples
    --------
    >>> from pylate_fastmaxsim.recipes.backend import backend
    >>> from pylate_fastmaxsim.recipes.config.schema import ModelSection
    >>> backend(ModelSection(kind="colbert"), "pylate_fastmaxsim.recipes.training").HOST
    'PyLate'
    """
    module = MODULES[model.kind]
    if module == "multi_vector" and not hasattr(sentence_transformers, "MultiVectorEncoder"):
        raise RecipeError(
            "model.kind multi_vector needs Sentence Transformers 6, in an environment without PyLate: pip install "
            f'"pylate-fastmaxsim[multi-vector,recipes]" (installed is {sentence_transformers.__version__}).'
        )
    try:
        return import_module(f"{package}.{module}")
    except ImportError as error:
        if module not in NEEDED:
            raise
        library, extra = NEEDED[module]
        raise RecipeError(
            f'model.kind {model.kind} needs {library}: pip install "pylate-fastmaxsim[{extra}]" ({error}).'
        ) from error
