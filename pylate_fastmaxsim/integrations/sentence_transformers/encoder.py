"""Encode texts of a MultiVectorEncoder without padding while it is in training.

Only the encoder leaves the padding out. Its hidden states are padded again for what follows, as Sentence Transformers
does after FlashAttention: projection, masks and losses, also the user's own, are unchanged. Padding holds the state of a
token, not zeros. A model with a module that reads padding, or with code of the user's own, is encoded with padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial, wraps

import torch
from sentence_transformers.base.modules import Transformer
from sentence_transformers.multi_vector_encoder import MultiVectorEncoder
from torch import Tensor

from pylate_fastmaxsim.integrations.encoding import gradcache as encoding_gradcache
from pylate_fastmaxsim.integrations.encoding.batch import Documents, padded_again
from pylate_fastmaxsim.integrations.encoding.modes import APART, GAP, UNDERSTOOD, mode_for
from pylate_fastmaxsim.integrations.log import log_once
from pylate_fastmaxsim.integrations.models.context import setting
from pylate_fastmaxsim.integrations.models.encoders import inputs_of
from pylate_fastmaxsim.integrations.options import current_options
from pylate_fastmaxsim.integrations.patching.patches import Patch
from pylate_fastmaxsim.integrations.patching.redirect import detached
from pylate_fastmaxsim.integrations.sentence_transformers import loss_columns
from pylate_fastmaxsim.integrations.sentence_transformers.behind import reader_of_padding
from pylate_fastmaxsim.integrations.sentence_transformers.losses import Batch
from pylate_fastmaxsim.integrations.sentence_transformers.padding_free import (
    COUNTED,
    FLATTENED,
    TEXT_METADATA,
    as_wide_as_ever,
    compile_layers,
    counts_calls,
    grouped_states,
    has_texts,
    packed_states,
    reason_in_transformer,
    say_flattened,
    say_padded,
    understood,
)

_stock_transformer = detached(Transformer.forward)

# The model in training whose forward is running, and its keywords; None inside the check on the first batch.
_in_training: ContextVar[tuple[MultiVectorEncoder, dict] | None] = ContextVar("in_training", default=None)

# Whether that check is running.
_checking: ContextVar[bool] = ContextVar("checking", default=False)

# Sentence Transformers adds it to expanded queries, whose masked tokens are encoded.
_EXPANDED = "query_expansion_positions"


def patches() -> list[Patch]:
    """What to replace in Sentence Transformers."""
    return [
        # Both: accelerate puts a forward on the instance for mixed precision, and a subclass may have its own.
        Patch(MultiVectorEncoder, "__call__", called),
        Patch(MultiVectorEncoder, "forward", encode),
        Patch(Transformer, "forward", forward),
    ]


def _noting_training(stock: Callable) -> Callable:
    """A call of a model that notes whether the model is in training."""

    @wraps(stock)
    def call(self: MultiVectorEncoder, *args, **kwargs) -> dict[str, Tensor]:
        # A model compiled as a whole is left to stock: decisions about it cannot be traced.
        if torch.compiler.is_compiling() or self._compiled_call_impl is not None:
            return stock(self, *args, **kwargs)
        leaves_padding_out = self.training and current_options() is not None and not _checking.get()
        with setting(_in_training, (self, kwargs) if leaves_padding_out else None):
            return stock(self, *args, **kwargs)

    return call


called = _noting_training(detached(MultiVectorEncoder.__call__))
encode = _noting_training(detached(MultiVectorEncoder.forward))


@wraps(_stock_transformer)
def forward(self: Transformer, features: dict[str, Tensor], **kwargs) -> dict[str, Tensor]:
    if torch.compiler.is_compiling() or (running := _in_training.get()) is None:
        return _stock_transformer(self, features, **kwargs)
    with setting(_in_training, None):
        hidden = _without_padding(*running, self, features, kwargs)
    if hidden is None:
        return _stock_transformer(self, features, **kwargs)
    features[self.module_output_name] = hidden
    return features


def _without_padding(
    model: MultiVectorEncoder, of_model: dict, transformer: Transformer, features: dict[str, Tensor], kwargs: dict
) -> Tensor | None:
    """Hidden states ``[N, L, d]`` of padded texts; None if Sentence Transformers is to encode them."""
    options = current_options()
    if options is None:
        return None
    if FLATTENED in features:
        say_flattened(transformer, bool(options.padding_free), options.compile)
        return None
    # Before anything is encoded: checkpointing needs the same layers in forward and backward.
    if options.compile:
        compile_layers(transformer)
    if not has_texts(features) or not options.padding_free or _EXPANDED in features:
        return None
    batch = loss_columns.current()
    if batch is not None and (hidden := batch.take(transformer, features)) is not None:
        return hidden
    reason = _reason_in_features(transformer, features, kwargs) or reason_in_transformer(transformer, model)
    if reason is not None:
        say_padded(transformer, reason)
        return None
    metadata = {key: features[key] for key in TEXT_METADATA.intersection(features)}
    call = partial(_called, transformer, metadata)
    columns = [understood(features)]
    behind = () if batch is None else batch.behind(features)
    apart = _reason_apart(batch, model, transformer, behind) if behind else None
    if apart is None:
        columns += map(understood, behind)
    backwards = encoding_gradcache.inside()
    mode = encoding_gradcache.replay(
        lambda: mode_for(
            transformer,
            as_wide_as_ever(transformer, columns),
            None,
            backwards,
            host="Sentence Transformers",
            whole=model,
            task=of_model.get("task"),
            why_not_behind=partial(_why_not_behind, model, transformer, metadata, of_model),
        )
    )
    if mode == "padded":
        return None
    if mode == "packed" and apart is not None:
        log_once(APART, apart, about=transformer)
    if mode == "packed" and len(columns) > 1:
        documents = Documents.from_columns(columns)
        if not documents.gaps and loss_columns.are_few(documents):
            return batch.keep(transformer, documents, packed_states(transformer, documents, call))
    documents = encoding_gradcache.replay(lambda: Documents.from_columns(columns[:1]), of_texts=True)
    if len(documents.token_index) == 0:
        return None
    if documents.gaps:
        reason = GAP
    elif mode == "grouped" and counts_calls(transformer):
        reason = COUNTED
    if reason is not None:
        say_padded(transformer, reason)
        return None
    states = packed_states(transformer, documents, call) if mode == "packed" else grouped_states(documents, call)
    shape = features["input_ids"].shape
    return padded_again(states, documents.token_index, *shape, filler=states[:1])


def _called(transformer: Transformer, metadata: dict, features: dict[str, Tensor]) -> Tensor:
    return _stock_transformer(transformer, {**metadata, **features})[transformer.module_output_name]


def _reason_apart(
    batch: Batch,
    model: MultiVectorEncoder,
    transformer: Transformer,
    documents: Sequence[dict[str, Tensor]],
) -> str | None:
    """Why documents need calls of their own."""
    if not all(map(has_texts, documents)):
        return "a column of documents has no texts"
    reasons = (_reason_in_features(transformer, each, {}) for each in documents)
    if (reason := next(filter(None, reasons), None)) is not None:
        return reason
    if counts_calls(transformer):
        return COUNTED
    return batch.reason_apart(model, transformer, known=(MultiVectorEncoder, Transformer))


# This and reason_in_transformer check what mode_for does not.
def _reason_in_features(transformer: Transformer, features: dict[str, Tensor], kwargs: dict) -> str | None:
    called = transformer.modality_config.get(features.get("modality", "text"), {})
    output = called.get("method"), called.get("method_output_name"), transformer.module_output_name
    if output not in (
        ("forward", "last_hidden_state", "token_embeddings"),
        ("forward", ("last_hidden_state",), "token_embeddings"),
    ):
        return "its output is not the last hidden state of each token"
    if "text" not in transformer.modality_config:
        return "it takes no plain texts, which the check on the first batch needs"
    # Keywords replace features, also known ones. A call that is checkpointed finds the output of the first one there.
    left = {transformer.module_output_name} - inputs_of(transformer)
    if unknown := sorted((features.keys() - UNDERSTOOD - left | kwargs.keys()) - TEXT_METADATA):
        return f"the encoder may take {', '.join(unknown)}"
    if TEXT_METADATA & inputs_of(transformer):
        return f"the encoder takes {', '.join(sorted(TEXT_METADATA & inputs_of(transformer)))}"
    return None


def _why_not_behind(
    model: MultiVectorEncoder, transformer: Transformer, metadata: dict, of_model: dict, samples: Documents
) -> str | None:
    with setting(_checking, True):
        return reader_of_padding(model, transformer, {**metadata, **samples.column}, of_model)
