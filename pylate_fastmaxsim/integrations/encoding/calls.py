"""Calls of a model: their inputs and the token embeddings that they return."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from pylate_fastmaxsim.integrations.encoding.batch import Documents
from pylate_fastmaxsim.integrations.encoding.mask_sync import uninspected
from pylate_fastmaxsim.integrations.models.encoders import positions, takes_token_types


def token_embeddings(model: nn.Module, features: dict[str, Tensor]) -> Tensor:
    """Token embeddings ``[N, L, d]`` of one call of the model. ``features`` is not changed."""
    with uninspected():
        return model(dict(features))["token_embeddings"]


def positioned(core: nn.Module, documents: Documents) -> tuple[Documents, Tensor]:
    """The documents, and positions ``[N, L]`` of their tokens.

    Documents get token types as well, if the encoder has any: what it would make up from the shape of its input would
    be wrong for packed documents.
    """
    if documents.token_type_ids is None and takes_token_types(core):
        documents = replace(documents, token_type_ids=torch.zeros_like(documents.input_ids))
    return documents, positions(core, documents.input_ids)
