"""Load a model that retrieves texts, of the kind that its files say it is."""

from __future__ import annotations

from pathlib import Path

import sentence_transformers
import torch
from sentence_transformers import SparseEncoder

from pylate_fastmaxsim.recipes.config.kinds import ColBERTSection
from pylate_fastmaxsim.recipes.errors import RecipeError, first_line
from pylate_fastmaxsim.recipes.models.load import (
    CONFIG_FILE,
    HostModel,
    is_missing_folder,
    load_model,
    model_failure,
    model_type,
)
from pylate_fastmaxsim.retrieval.static.files import DESCRIPTION_FILE as STATIC_FILE
from pylate_fastmaxsim.retrieval.static.model import StaticLateInteraction

# What loads a model of each class.
NEEDED = {
    "ColBERT": "PyLate, or Sentence Transformers 6",
    "MultiVectorEncoder": "Sentence Transformers 6",
    "SparseEncoder": "Sentence Transformers",
}


def load_retriever(
    name: str, device: torch.device | str, trust_remote_code: bool = False, key: str = "MODEL"
) -> HostModel | StaticLateInteraction:
    """The model in this folder or of this name on the Hub, as the class that saved it.

    Where PyLate is not installed, its ColBERT is loaded as a MultiVectorEncoder, which scores the same. ``key`` is what
    an error calls the model.

    Raises
    ------
    RecipeError
        There is no such model, it is of another kind, it cannot be loaded, or a sparse model has another similarity than
        the inner product.
    """
    kind, path = saved_class(name, key), Path(name).expanduser()
    if kind == "StaticLateInteraction":
        try:
            return StaticLateInteraction.load(path, device)
        except (ValueError, OSError) as error:
            raise RecipeError(f"{key} {name} cannot be loaded: {first_line(error)}") from error
    section = ColBERTSection(name_or_path=str(path) if path.is_dir() else name, trust_remote_code=trust_remote_code)
    if kind == "ColBERT" and _has_pylate():
        return load_model(section, device, seed=0, key=key)
    host = SparseEncoder if kind == "SparseEncoder" else getattr(sentence_transformers, "MultiVectorEncoder", None)
    if host is None:
        raise RecipeError(
            f"{key} {name} is a {kind}, which needs {NEEDED[kind]}, but Sentence Transformers "
            f"{sentence_transformers.__version__} is installed."
        )
    try:
        model = host(section.name_or_path, device=str(device), trust_remote_code=trust_remote_code)
    except Exception as error:  # each library that reads the files has its own errors
        raise model_failure(key, section, error) from error
    if host is SparseEncoder:
        require_inner_product(model, key, name)
    return model


def saved_class(name: str, key: str = "MODEL") -> str:
    """The class that has saved the model in this folder or of this name on the Hub, as its files say.

    Raises
    ------
    RecipeError
        There is no such model, or it is of another class.
    """
    if is_missing_folder(name):
        raise RecipeError(f"{key}: there is no folder {name}.")
    path = Path(name).expanduser()
    if (path / STATIC_FILE).exists():
        return "StaticLateInteraction"
    name = str(path) if path.is_dir() else name
    try:
        kind = model_type(name)
    except Exception as error:  # of the Hub's client, or of a file that is not JSON
        raise model_failure(key, ColBERTSection(name_or_path=name), error) from error
    if kind not in NEEDED:
        found = f"{CONFIG_FILE} says {kind}" if kind else f"it has no {CONFIG_FILE}"
        raise RecipeError(
            f"{key} {name} must be a ColBERT that PyLate has saved, a MultiVectorEncoder or SparseEncoder that Sentence "
            f"Transformers has saved or a StaticLateInteraction, but {found}."
        )
    return kind


def _has_pylate() -> bool:
    """Whether PyLate can be imported; Sentence Transformers 6 excludes it."""
    try:
        import pylate.models  # noqa: F401
    except ImportError:
        return False
    return True


def require_inner_product(model: SparseEncoder, key: str, name: str) -> None:
    """Refuse a model with another similarity, which exact sparse search has not."""
    if model.similarity_fn_name != "dot":
        raise RecipeError(
            f"{key} {name} must score by the inner product (dot), but its similarity is {model.similarity_fn_name}."
        )
