"""The encoder in a model of texts, and how many tokens of a text it was made for."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from pylate_fastmaxsim.recipes.config.kinds import LateModelSection
from pylate_fastmaxsim.recipes.errors import RecipeError


def encoder_of(model: torch.nn.Module) -> PreTrainedModel:
    """The model of transformers in a text encoder, also below the route of a Router."""
    return next(module for module in model.modules() if isinstance(module, PreTrainedModel))


def positions(encoder: torch.nn.Module) -> int | None:
    """How many tokens of a text an encoder was made for; None if it does not say."""
    return min(learned_positions(encoder), default=getattr(encoder.config, "max_position_embeddings", None))


def check_query_and_document_length(section: LateModelSection, encoder: torch.nn.Module) -> None:
    """Refuse lengths beyond the encoder's positions.

    Learned positions limit queries and documents. Rotary positions limit only queries, which are padded to their
    length: documents longer than the encoder was trained for are common.
    """
    learned, made_for = learned_positions(encoder), getattr(encoder.config, "max_position_embeddings", None)
    for key, limit in {
        "query_length": min(learned, default=made_for),
        "document_length": min(learned, default=None),
    }.items():
        length = getattr(section, key)
        if length is not None and limit is not None and length > limit:
            raise RecipeError(
                f"model.{key} must be at most {limit}, as many positions as {type(encoder).__name__} has, got {length}."
            )


def learned_positions(encoder: torch.nn.Module) -> list[int]:
    """How many tokens of a text each table of learned positions has."""
    # In RoBERTa the positions of a text begin after that of padding.
    return [
        table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)
        for name, table in encoder.named_modules()
        if name.endswith("position_embeddings") and isinstance(table, torch.nn.Embedding)
    ]
