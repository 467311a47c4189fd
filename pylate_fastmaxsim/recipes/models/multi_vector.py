"""MultiVectorEncoders: late interaction of Sentence Transformers 6."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sentence_transformers
import torch
from transformers import ModernBertModel, PreTrainedTokenizerBase

from pylate_fastmaxsim.recipes.config.schema import ModelSection
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.models.load import json_of, model_type
from pylate_fastmaxsim.recipes.models.positions import check_query_and_document_length
from pylate_fastmaxsim.recipes.models.retriever import encoder_of

if TYPE_CHECKING:
    from sentence_transformers import MultiVectorEncoder

# Of a model from scratch.
ENCODER_CLASS = ModernBertModel
# The tokens of a ColBERT's query, where neither the recipe nor the checkpoint says how many.
EXPANDED_LENGTH = 32
# Keys of what the first module does with texts.
TEXT_KEYS = ("query_length", "document_length", "do_query_expansion", "attend_to_expansion_tokens")


def load(
    section: ModelSection, device: torch.device | str, key: str, checkpoint: Path | None = None
) -> MultiVectorEncoder:
    """The model of a section, which PyLate may have saved; a projection that it lacks is drawn at random.

    Parameters
    ----------
    section
        A section of ``kind`` multi_vector.
    device
        Where the weights go.
    key
        What an error calls the model.
    checkpoint
        A checkpoint of the training of this section, which is loaded instead.
    """
    if checkpoint is not None:
        section = replace(section, name_or_path=str(checkpoint))
    name = section.name_or_path
    if model_type(name) == "SparseEncoder":  # of which Sentence Transformers would take the encoder
        raise RecipeError(
            f"{key} {name} does not fit model.kind multi_vector: it is a SparseEncoder, which model.kind splade trains."
        )
    model = of_encoder(section, device)
    sizes = [module.out_features for module in _projections(model)][-1:]
    if section.embedding_size not in (None, *sizes):
        allowed = " or ".join([*map(str, sizes), "null"])
        raise RecipeError(
            f"model.embedding_size must be {allowed}, because {key} {name} has a projection already, got "
            f"{section.embedding_size}."
        )
    check_lengths(section, model)
    return model


def of_encoder(section: ModelSection, device: torch.device | str) -> MultiVectorEncoder:
    """``sentence_transformers.MultiVectorEncoder`` with the values of a section."""
    options: dict[str, Any] = {}
    if section.config_kwargs:
        options["config_kwargs"] = dict(section.config_kwargs)
    if section.attn_implementation is not None:
        options["model_kwargs"] = {"attn_implementation": section.attn_implementation}
    name = section.name_or_path
    model = sentence_transformers.MultiVectorEncoder(
        name, device=str(device), trust_remote_code=section.trust_remote_code, **options
    )
    if section.embedding_size is not None and not _has_projection(name):
        for projection in _projections(model):  # the one that was added, of another size
            projection.linear = torch.nn.Linear(
                projection.in_features, section.embedding_size, bias=False, device=model.device
            )
            projection.out_features = section.embedding_size
    _set_lengths(section, model)
    return model


def _has_projection(name: str) -> bool:
    """Whether a checkpoint has a projection, which Sentence Transformers also keeps of a SentenceTransformer."""
    saved = [module["type"].rpartition(".")[2] for module in json_of(name, "modules.json") or []]
    return "Dense" in saved or model_type(name) in ("MultiVectorEncoder", "ColBERT")


def _projections(model: MultiVectorEncoder) -> list[torch.nn.Module]:
    return [module for module in model if hasattr(module, "out_features")]


def _set_lengths(section: ModelSection, model: MultiVectorEncoder) -> None:
    """Set what a section says of the lengths of texts and of query expansion; null keeps what the checkpoint has."""
    given = [key for key in TEXT_KEYS if getattr(section, key) is not None]
    transformer = model[0]
    if given and not hasattr(transformer, "query_expansion"):
        raise RecipeError(
            f"model.{given[0]} must be null for {section.name_or_path}, which begins with a {type(transformer).__name__} and "
            "not with a Transformer."
        )
    if section.document_length is not None:
        transformer.document_length = section.document_length
    if not {"query_length", "do_query_expansion", "attend_to_expansion_tokens"}.intersection(given):
        return
    expansion, length = transformer.query_expansion, section.query_length
    if section.do_query_expansion is False:
        expansion = None
    elif section.do_query_expansion or expansion is not None:
        had = expansion or {"strategy": "fixed", "length": transformer.query_length or EXPANDED_LENGTH}
        attend = section.attend_to_expansion_tokens
        expansion = {**had, "attend": had.get("attend", False) if attend is None else attend}
    if expansion is not None and expansion["strategy"] == "fixed":
        # All queries have this length, and no other one may be below it.
        expansion["length"], length = length or expansion["length"], None
        transformer.query_length = None
    transformer.query_length = length or transformer.query_length
    transformer.query_expansion = expansion


def tokenizer_of(model: MultiVectorEncoder) -> PreTrainedTokenizerBase:
    """The tokenizer that a model was loaded with."""
    return model.tokenizer


def check_lengths(section: ModelSection, model: MultiVectorEncoder) -> None:
    """Refuse lengths beyond the encoder's positions."""
    check_query_and_document_length(section, encoder_of(model))
