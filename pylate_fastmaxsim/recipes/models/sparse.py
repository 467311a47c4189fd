"""SPLADE models: SparseEncoders of Sentence Transformers whose pooling is SpladePooling."""

from __future__ import annotations

from pathlib import Path

import torch
from sentence_transformers import SparseEncoder
from transformers import ModernBertForMaskedLM, PreTrainedTokenizerBase

from pylate_fastmaxsim.integrations.sparse_encoder.names import (
    MaskedLanguageModel,
    Router,
    SparseStaticEmbedding,
    SpladePooling,
    gives_logits,
)
from pylate_fastmaxsim.recipes.config.schema import ModelSection
from pylate_fastmaxsim.recipes.errors import RecipeError
from pylate_fastmaxsim.recipes.models.positions import learned_positions
from pylate_fastmaxsim.recipes.models.retriever import encoder_of

# Of a model from scratch.
ENCODER_CLASS = ModernBertForMaskedLM


def load(section: ModelSection, device: torch.device | str, key: str, checkpoint: Path | None = None) -> SparseEncoder:
    """The model of a section: a saved SparseEncoder, or one made of a masked language model.

    Parameters
    ----------
    section
        A section of ``kind`` splade.
    device
        Where the weights go.
    key
        What an error calls the model.
    checkpoint
        A checkpoint of the training of this section, which is loaded instead.
    """
    name = section.name_or_path if checkpoint is None else str(checkpoint)
    options = {"config_kwargs": dict(section.config_kwargs)} if section.config_kwargs else {}
    model = SparseEncoder(name, device=str(device), trust_remote_code=section.trust_remote_code, **options)
    if not _language_models(model) or not any(isinstance(module, SpladePooling) for module in model.modules()):
        raise RecipeError(
            f"{key} {name} must be a masked language model, or a SparseEncoder with SpladePooling, but has the modules "
            f"{', '.join(type(module).__name__ for module in model)}."
        )
    require_inner_product(model, key, name)
    if section.inference_free and not isinstance(model[0], Router):
        model = with_static_queries(model)
    elif isinstance(model[0], Router) and not section.inference_free:
        raise RecipeError(f"model.inference_free must be true for {key} {name}, which has a route for queries.")
    check_lengths(section, model)
    _set_length(section, model)
    return model


def of_encoder(section: ModelSection, device: torch.device | str) -> SparseEncoder:
    """A model of the masked language model of a section."""
    return SparseEncoder(section.name_or_path, device=str(device))


def _language_models(model: SparseEncoder) -> list[MaskedLanguageModel]:
    return [module for module in model.modules() if isinstance(module, MaskedLanguageModel) and gives_logits(module)]


def tokenizer_of(model: SparseEncoder) -> PreTrainedTokenizerBase:
    """The tokenizer that a model was loaded with."""
    return model.tokenizer


def require_inner_product(model: SparseEncoder, key: str, name: str) -> None:
    """Refuse a model with another similarity, which exact sparse search has not."""
    if model.similarity_fn_name != "dot":
        raise RecipeError(
            f"{key} {name} must score by the inner product (dot), but its similarity is {model.similarity_fn_name}."
        )


def with_static_queries(model: SparseEncoder) -> SparseEncoder:
    """A model with these modules for documents, and for queries a weight of each token, at first 1."""
    # Not of the tokenizer's length: some encoders pad their vocabulary, and both sides need vectors of one size.
    queries = SparseStaticEmbedding(model.tokenizer, torch.ones(encoder_of(model).config.vocab_size))
    router = Router.for_query_document([queries], list(model))
    routed = SparseEncoder(modules=[router], device=str(model.device), similarity_fn_name="dot")
    routed.model_card_data.base_model = model.model_card_data.base_model
    return routed


def _set_length(section: ModelSection, model: SparseEncoder) -> None:
    """Cut texts after ``max_seq_length`` tokens."""
    if section.max_seq_length is None:
        return
    for module in _language_models(model):
        module.max_seq_length = section.max_seq_length


def check_lengths(section: ModelSection, model: SparseEncoder) -> None:
    """Refuse texts of more tokens than the encoder has positions."""
    encoder, length = encoder_of(model), section.max_seq_length
    limit = min(learned_positions(encoder), default=None)
    if length is not None and limit is not None and length > limit:
        raise RecipeError(
            f"model.max_seq_length must be at most {limit}, as many positions as {type(encoder).__name__} has, got {length}."
        )
