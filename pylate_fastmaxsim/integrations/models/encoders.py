"""The encoder of a model: where it is, what it is given, and how it numbers positions.

The model is a ``pylate.models.ColBERT``, or the Transformer of Sentence Transformers that it begins with.
"""

from __future__ import annotations

import inspect
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

# Of each encoder, the position of its padding token where positions are counted from behind that (RoBERTa), and whether
# it has token types.
_counting: WeakKeyDictionary[nn.Module, tuple[int | None, bool]] = WeakKeyDictionary()


def transformer_of(core: nn.Module) -> nn.Module:
    """The Transformer of Sentence Transformers that a model begins with, or that it is."""
    return core._first_module() if hasattr(core, "_first_module") else core


def with_adapters(core: nn.Module) -> nn.Module:
    """The encoder with what PEFT has wrapped around it."""
    return transformer_of(core).auto_model


def encoder_of(core: nn.Module) -> nn.Module:
    """The model of transformers, inside PEFT where that is used."""
    encoder = with_adapters(core)
    return encoder.get_base_model() if hasattr(encoder, "get_base_model") else encoder


def inputs_of(core: nn.Module) -> set[str]:
    """The features that Sentence Transformers hands on to the encoder."""
    transformer = transformer_of(core)
    # Since release 6, None is all but what is its own, where the encoder takes any keywords.
    named = transformer.model_forward_params
    return transformer._declared_forward_params if named is None else named


def layers_share_keys(transformer: nn.Module) -> bool:
    """Whether layers of a Transformer find keys and values of others in the cache, as those of Gemma 3n do."""
    config = getattr(getattr(transformer, "auto_model", None), "config", None)
    if hasattr(config, "get_text_config"):  # not in transformers before 4.46, nor such layers
        config = config.get_text_config()
    return bool(getattr(config, "num_kv_shared_layers", 0))


def checkpoints_layers(core: nn.Module) -> bool:
    """Whether gradient checkpointing is on, in whatever transformers calls its property for that."""
    return any(getattr(module, "gradient_checkpointing", False) for module in encoder_of(core).modules())


def takes_token_types(core: nn.Module) -> bool:
    """Whether the encoder has embeddings of token types."""
    return _counting_of(core)[1]


def positions(core: nn.Module, input_ids: Tensor) -> Tensor:
    """Position of each token of padded texts in the encoder's own counting, ``[N, L]``."""
    padding, _ = _counting_of(core)
    if padding is None:
        return torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    # RoBERTa counts from behind the position of its padding token, and only what is not that token.
    counted = input_ids != padding
    return counted.cumsum(dim=1) * counted + padding


def position_table(core: nn.Module) -> nn.Embedding | None:
    """Learned positions that are counted from behind that of the padding token, as RoBERTa's are."""
    for module in encoder_of(core).modules():
        table = getattr(module, "position_embeddings", None)
        if isinstance(table, nn.Embedding) and table.padding_idx is not None:
            return table
    return None


def _has_token_types(encoder: nn.Module) -> bool:
    """Whether it has embeddings of token types: GPT-2 takes them as well, as words."""
    return any("token_type" in name.rpartition(".")[2] for name, _ in encoder.named_modules())


def _counting_of(core: nn.Module) -> tuple[int | None, bool]:
    encoder = encoder_of(core)
    if encoder not in _counting:
        table = position_table(core)
        takes_types = "token_type_ids" in inspect.signature(encoder.forward).parameters and _has_token_types(encoder)
        _counting[encoder] = (None if table is None else table.padding_idx, takes_types)
    return _counting[encoder]
