"""The encoder of a model: where it is, what it is given, and how it numbers positions.

The model is a ``pylate.models.ColBERT``, or the Transformer of Sentence Transformers that it begins with.
"""

from __future__ import annotations

import inspect
from functools import lru_cache, wraps
from importlib import util
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from pylate_fastmaxsim.integrations.patching.patches import Patch, detached

# Of each encoder, the position of its padding token if positions are counted from there (RoBERTa), and whether it has
# token types.
_found: WeakKeyDictionary[nn.Module, tuple[int | None, bool]] = WeakKeyDictionary()

_made: WeakKeyDictionary[nn.Module, HiddenStates] = WeakKeyDictionary()


def transformer_of(core: nn.Module) -> nn.Module:
    """The Transformer of Sentence Transformers that a model begins with, or that it is."""
    return core._first_module() if hasattr(core, "_first_module") else core


def with_adapters(core: nn.Module) -> nn.Module:
    """The encoder, with PEFT's wrapper if there is one."""
    return transformer_of(core).auto_model


def encoder_of(core: nn.Module) -> nn.Module:
    """The model of transformers, without PEFT's wrapper."""
    encoder = with_adapters(core)
    return encoder.get_base_model() if hasattr(encoder, "get_base_model") else encoder


def inputs_of(core: nn.Module) -> set[str]:
    """The features that Sentence Transformers passes to the encoder."""
    transformer = transformer_of(core)
    # None since release 6: the encoder takes any keyword, and is given all but Sentence Transformers' own.
    named = transformer.model_forward_params
    return transformer._declared_forward_params if named is None else named


def layers_share_keys(transformer: nn.Module) -> bool:
    """Check whether layers of a Transformer read keys and values of other layers from the cache (Gemma 3n)."""
    config = getattr(getattr(transformer, "auto_model", None), "config", None)
    if hasattr(config, "get_text_config"):  # not in transformers before 4.46, nor such layers
        config = config.get_text_config()
    return bool(getattr(config, "num_kv_shared_layers", 0))


@lru_cache(maxsize=1)
def patches() -> tuple[Patch, ...]:
    """Have decoders keep no KV cache, as Sentence Transformers does itself since release 6.

    Encoding never decodes further, so the cache is dead weight: each layer copies its keys and values, the copies live
    until the forward ends, and each layer's own place in the cache makes ``torch.compile`` compile every layer for itself.
    """
    if util.find_spec("sentence_transformers.multi_vector_encoder") is not None:
        return ()
    from sentence_transformers.models import Transformer

    stock = detached(Transformer.forward)

    @wraps(stock)
    def forward(self: Transformer, features: dict[str, Tensor], **kwargs: object) -> dict[str, Tensor]:
        asked = "use_cache" in features or "use_cache" in kwargs
        if "use_cache" in self.model_forward_params and not asked and not layers_share_keys(self):
            kwargs["use_cache"] = False
        return stock(self, features, **kwargs)

    return (Patch(Transformer, "forward", forward),)


def checkpoints_layers(core: nn.Module) -> bool:
    """Check whether gradient checkpointing is on."""
    # transformers' own property has changed its name.
    return any(getattr(module, "gradient_checkpointing", False) for module in encoder_of(core).modules())


def takes_token_types(core: nn.Module) -> bool:
    """Check whether the encoder has embeddings of token types. GPT-2 takes token types, but embeds them as words."""
    return _of_encoder(core)[1]


def positions(core: nn.Module, input_ids: Tensor) -> Tensor:
    """The encoder's position of each token of padded texts, ``[N, L]``."""
    padding, _ = _of_encoder(core)
    if padding is None:
        return torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    # RoBERTa counts from the position after its padding token, and skips padding tokens.
    counted = input_ids != padding
    return counted.cumsum(dim=1) * counted + padding


def position_table(core: nn.Module) -> nn.Embedding | None:
    """Learned positions that are counted from the one after the padding token's (RoBERTa)."""
    for module in encoder_of(core).modules():
        table = getattr(module, "position_embeddings", None)
        if isinstance(table, nn.Embedding) and table.padding_idx is not None:
            return table
    return None


def _of_encoder(core: nn.Module) -> tuple[int | None, bool]:
    encoder = encoder_of(core)
    if encoder not in _found:
        table = position_table(core)
        takes_types = "token_type_ids" in inspect.signature(encoder.forward).parameters and any(
            "token_type" in name.rpartition(".")[2] for name, _ in encoder.named_modules()
        )
        _found[encoder] = (None if table is None else table.padding_idx, takes_types)
    return _found[encoder]


def is_packed_mask(attention_mask: object) -> bool:
    """Check whether a mask is that of a row of many texts (``encoding/attention.py``): a real mask is never int32."""
    return isinstance(attention_mask, Tensor) and attention_mask.dtype == torch.int32 and attention_mask.dim() == 4


class HiddenStates(nn.Module):
    """Hidden states in the place of what the head makes of them: for a masked language model, of logits.

    It shares the modules of the encoder, and stands in for a Transformer of Sentence Transformers.
    """

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.auto_model = encoder
        self.model_forward_params = set(inspect.signature(encoder.forward).parameters)
        self.tokenizer = None

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        given = {key: value for key, value in features.items() if key in self.model_forward_params}
        return {"token_embeddings": self.auto_model(**given, return_dict=True).last_hidden_state}


def hidden_states_of(transformer: nn.Module) -> HiddenStates:
    """Hidden states for a Transformer of Sentence Transformers, with its present tokenizer and mode."""
    encoder = encoder_of(transformer).base_model
    found = _made.get(transformer)
    if found is None or found.auto_model is not encoder:
        found = _made[transformer] = HiddenStates(encoder)
    found.training, found.tokenizer = transformer.training, transformer.tokenizer
    return found
