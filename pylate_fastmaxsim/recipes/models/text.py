"""PyLate's ColBERT models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from pylate import models
from transformers import ModernBertModel, PreTrainedTokenizerBase

from pylate_fastmaxsim.recipes.config.schema import ModelSection
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.models.positions import check_query_and_document_length

# Of a model from scratch.
ENCODER_CLASS = ModernBertModel


def load(section: ModelSection, device: torch.device | str, key: str, checkpoint: Path | None = None) -> models.ColBERT:
    """The model of a section; a projection that it lacks is drawn from the random numbers in force.

    Parameters
    ----------
    section
        A section of ``kind`` colbert.
    device
        Where the weights go.
    key
        What an error calls the model.
    checkpoint
        A checkpoint of the training of this section, which is loaded instead.
    """
    if checkpoint is not None:
        section = replace(section, name_or_path=str(checkpoint))
    model = of_encoder(section, device)
    _check_embedding_size(section, model, key)
    check_lengths(section, model)
    return model


def tokenizer_of(model: models.ColBERT) -> PreTrainedTokenizerBase:
    """The tokenizer that a model was loaded with."""
    return model.tokenizer


def of_encoder(section: ModelSection, device: torch.device | str) -> models.ColBERT:
    """``pylate.models.ColBERT`` with the arguments of a section."""
    return models.ColBERT(
        model_name_or_path=section.name_or_path,
        device=str(device),
        embedding_size=section.embedding_size,
        query_length=section.query_length,
        document_length=section.document_length,
        do_query_expansion=section.do_query_expansion,
        attend_to_expansion_tokens=section.attend_to_expansion_tokens,
        config_kwargs=dict(section.config_kwargs),
        trust_remote_code=section.trust_remote_code,
    )


def _check_embedding_size(section: ModelSection, model: models.ColBERT, key: str) -> None:
    """Refuse a size for which PyLate has added a random projection after a trained one of another size.

    PyLate only warns, and the commands do not show that warning.
    """
    if section.embedding_size is None or len(model) <= 2:
        return  # one projection, of the checkpoint or added because it has none
    own = of_encoder(replace(section, embedding_size=None), "cpu")  # a checkpoint may have several of its own
    if len(own) < len(model):
        size = own[-1].out_features
        raise RecipeError(
            f"model.embedding_size must be {size} or null, because {key} {section.name_or_path} ends with a projection of "
            f"that size, got {section.embedding_size}."
        )


def check_lengths(section: ModelSection, model: models.ColBERT) -> None:
    """Refuse lengths beyond the encoder's positions."""
    check_query_and_document_length(section, model[0].auto_model)
