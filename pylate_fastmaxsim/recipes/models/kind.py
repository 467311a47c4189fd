"""Load a model that retrieves texts, of the kind that its files say it is."""

from __future__ import annotations

from pathlib import Path

import torch
from sentence_transformers import SparseEncoder

from pylate_fastmaxsim.recipes.config.schema import ModelSection
from pylate_fastmaxsim.recipes.errors import RecipeError, first_line
from pylate_fastmaxsim.recipes.models.load import CONFIG_FILE, is_missing_folder, load_model, model_failure, model_type
from pylate_fastmaxsim.recipes.models.retriever import TextRetriever
from pylate_fastmaxsim.recipes.models.sparse import require_inner_product
from pylate_fastmaxsim.retrieval.static.files import DESCRIPTION_FILE as STATIC_FILE
from pylate_fastmaxsim.retrieval.static.model import StaticLateInteraction

LATE_INTERACTION, SPARSE, STATIC = "late interaction", "sparse", "static late interaction"


def load_retriever(
    name: str, device: torch.device | str, trust_remote_code: bool = False, key: str = "MODEL"
) -> TextRetriever:
    """The ColBERT of PyLate or the SparseEncoder of Sentence Transformers of this folder or name on the Hub.

    Or the StaticLateInteraction of this folder. ``key`` is what an error calls the model.

    Raises
    ------
    RecipeError
        There is no such model, it is of another kind, it cannot be loaded, or a sparse model has another similarity than
        the inner product.
    """
    if is_missing_folder(name):
        raise RecipeError(f"{key}: there is no folder {name}.")
    path = Path(name).expanduser()
    if (path / STATIC_FILE).exists():
        try:
            return StaticLateInteraction.load(path, device)
        except (ValueError, OSError) as error:
            raise RecipeError(f"{key} {name} cannot be loaded: {first_line(error)}") from error
    name = str(path) if path.is_dir() else name
    section = ModelSection(name_or_path=name, trust_remote_code=trust_remote_code)
    try:
        kind = model_type(name)
    except Exception as error:  # of the Hub's client, or of a file that is not JSON
        raise model_failure(key, section, error) from error
    if kind not in ("ColBERT", "SparseEncoder"):
        found = f"{CONFIG_FILE} says {kind}" if kind else f"it has no {CONFIG_FILE}"
        raise RecipeError(
            f"{key} {name} must be a ColBERT that PyLate has saved, a SparseEncoder that Sentence Transformers has saved or a "
            f"StaticLateInteraction, but {found}."
        )
    if kind == "ColBERT":
        return load_model(section, device, seed=0, key=key)
    try:
        model = SparseEncoder(name, device=str(device), trust_remote_code=trust_remote_code)
    except Exception as error:  # each library that reads the files has its own errors
        raise model_failure(key, section, error) from error
    require_inner_product(model, key, name)
    return model


def kind_of(model: TextRetriever) -> str:
    """The kind of a model that is loaded."""
    if isinstance(model, StaticLateInteraction):
        return STATIC
    return SPARSE if isinstance(model, SparseEncoder) else LATE_INTERACTION
