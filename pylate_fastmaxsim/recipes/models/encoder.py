"""The encoder in a model of texts, and its positions."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel


def encoder_of(model: torch.nn.Module) -> PreTrainedModel:
    """The model of transformers in a text encoder, also below the route of a Router."""
    return next(module for module in model.modules() if isinstance(module, PreTrainedModel))


def positions(encoder: torch.nn.Module) -> int | None:
    """Number of tokens of a text that an encoder was made for; None if it does not say."""
    return min(learned_positions(encoder), default=getattr(encoder.config, "max_position_embeddings", None))


def learned_positions(encoder: torch.nn.Module) -> list[int]:
    """Number of tokens of a text in each table of learned positions."""
    # In RoBERTa the positions of a text begin after that of padding.
    return [
        table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)
        for name, table in encoder.named_modules()
        if name.endswith("position_embeddings") and isinstance(table, torch.nn.Embedding)
    ]
