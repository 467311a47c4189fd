"""Encode texts of a MultiVectorEncoder without padding while it is in training.

Only the encoder leaves the padding out. Its hidden states are padded again for what follows, as Sentence Transformers
does after FlashAttention: projection, masks and losses, also the user's own, are unchanged. Padding holds the state of a
token, not zeros. A model with a module that reads padding, or with code of the user's own, is encoded with padding.
"""

from __future__ import annotations

from contextvars import ContextVar
from functools import wraps

from sentence_transformers.base.modules import Transformer
from sentence_transformers.multi_vector_encoder import MultiVectorEncoder
from torch import Tensor

from pylate_fastmaxsim.integrations.encoding import gradcache
from pylate_fastmaxsim.integrations.encoding.batch import Documents, attended_index, padded_again
from pylate_fastmaxsim.integrations.encoding.modes import mode_for
from pylate_fastmaxsim.integrations.models.context import setting
from pylate_fastmaxsim.integrations.models.encoders import inputs_of
from pylate_fastmaxsim.integrations.options import Options
from pylate_fastmaxsim.integrations.patching.patches import Patch, detached
from pylate_fastmaxsim.integrations.sentence_transformers.behind import reader_of_padding
from pylate_fastmaxsim.integrations.sentence_transformers.padding_free import (
    TEXT_METADATA,
    Features,
    TransformerCall,
    noting_model,
    pad_to_widest_seen,
    running_model,
)

_stock_transformer = detached(Transformer.forward)

# Whether the check on the first batch is running.
_checking: ContextVar[bool] = ContextVar("checking", default=False)

# Sentence Transformers adds it to expanded queries, whose masked tokens are encoded.
_EXPANDED = "query_expansion_positions"

_LAST_STATES = (
    ("forward", "last_hidden_state", "token_embeddings"),
    ("forward", ("last_hidden_state",), "token_embeddings"),
)


def patches() -> list[Patch]:
    """What to replace in Sentence Transformers."""
    return [
        # Both: accelerate puts a forward on the instance for mixed precision, and a subclass may have its own.
        Patch(MultiVectorEncoder, "__call__", called),
        Patch(MultiVectorEncoder, "forward", encode),
        Patch(Transformer, "forward", forward),
    ]


def _in_training(model: MultiVectorEncoder) -> bool:
    return model.training and not _checking.get()


called = noting_model(detached(MultiVectorEncoder.__call__), _in_training)
encode = noting_model(detached(MultiVectorEncoder.forward), _in_training)


@wraps(_stock_transformer)
def forward(self: Transformer, features: Features, **kwargs) -> Features:
    if (running := running_model(MultiVectorEncoder)) is None:
        return _stock_transformer(self, features, **kwargs)
    model, model_kwargs = running
    states = _Call(model, model_kwargs, self, features, kwargs).run()
    if states is None:
        return _stock_transformer(self, features, **kwargs)
    mask = features["attention_mask"]
    index, _ = attended_index(mask, total=len(states))
    filler = states[:1] if len(states) else states.new_ones(1, states.shape[1])
    features[self.module_output_name] = padded_again(states, index, *mask.shape, filler=filler)
    return features


class _Call(TransformerCall):
    """A call that makes hidden states ``[T, d]`` of the attended tokens."""

    known = MultiVectorEncoder, Transformer

    def __init__(self, model: MultiVectorEncoder, model_kwargs: dict, *args) -> None:
        super().__init__(model, *args)
        self._model_kwargs = model_kwargs
        self._metadata = {key: self.features[key] for key in TEXT_METADATA.intersection(self.features)}

    def applies(self, options: Options) -> bool:
        return bool(options.padding_free) and _EXPANDED not in self.features

    def mode(self, columns: list[Features]) -> str:
        return mode_for(
            self.transformer,
            pad_to_widest_seen(self.transformer, columns),
            None,
            gradcache.inside(),
            host="Sentence Transformers",
            whole=self.model,
            task=self._model_kwargs.get("task"),
            why_not_behind=self._reason_behind,
        )

    def call(self, features: Features) -> Tensor:
        output = _stock_transformer(self.transformer, {**self._metadata, **features})
        return output[self.transformer.module_output_name]

    def reason_in_output(self, features: Features) -> str | None:
        config, output_name = self.transformer.modality_config, self.transformer.module_output_name
        called = config.get(features.get("modality", "text"), {})
        if (called.get("method"), called.get("method_output_name"), output_name) not in _LAST_STATES:
            return "its output is not the last hidden state of each token"
        return None if "text" in config else "it takes no plain texts, which the check on the first batch needs"

    def given_to_encoder(self, features: Features) -> set[str]:
        # A call that is checkpointed finds the output of the first one there.
        return features.keys() - ({self.transformer.module_output_name} - inputs_of(self.transformer))

    def _reason_behind(self, samples: Documents) -> str | None:
        features = {**self._metadata, **samples.column}
        with setting(_checking, True):
            return reader_of_padding(self.model, self.transformer, features, self._model_kwargs)
