"""Encode texts of a MultiVectorEncoder without padding while it is in training.

Only the encoder leaves the padding out. Its hidden states are padded again for what follows, as Sentence Transformers
does after FlashAttention: projection, masks and losses, also the user's own, are unchanged. Padding holds the state of a
token, not zeros. A model with a module that may read padding is encoded with padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import wraps
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from sentence_transformers.base.modules import Dense, Normalize, Router, Transformer
from sentence_transformers.multi_vector_encoder import MultiVectorEncoder
from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling, MultiVectorMask
from sentence_transformers.multi_vector_encoder.modules.token_pooling import BaseTokenPooling
from sentence_transformers.sentence_transformer.modules import Dropout, LayerNorm, Pooling, WordWeights
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn import functional as F

from pylate_fastmaxsim.integrations.compilation import layers as compilation_layers
from pylate_fastmaxsim.integrations.encoding import gradcache as encoding_gradcache
from pylate_fastmaxsim.integrations.encoding import loss_columns
from pylate_fastmaxsim.integrations.encoding.attention import accept_packed_masks
from pylate_fastmaxsim.integrations.encoding.batch import Documents, padded_again
from pylate_fastmaxsim.integrations.encoding.calls import positioned
from pylate_fastmaxsim.integrations.encoding.mask_sync import uninspected
from pylate_fastmaxsim.integrations.encoding.modes import APART, mode_for
from pylate_fastmaxsim.integrations.encoding.plans import EncodingPlan, grouped_plan, nothing_skipped, packed_plan
from pylate_fastmaxsim.integrations.encoding.reasons import UNDERSTOOD
from pylate_fastmaxsim.integrations.log import log_once
from pylate_fastmaxsim.integrations.models.context import setting
from pylate_fastmaxsim.integrations.models.encoders import checkpoints_layers, encoder_of, inputs_of
from pylate_fastmaxsim.integrations.models.user_code import has_class_forward
from pylate_fastmaxsim.integrations.models.wrappers import divided_by_deepspeed, unwrap
from pylate_fastmaxsim.integrations.options import current_options
from pylate_fastmaxsim.integrations.patching.known_sources import unknown_part
from pylate_fastmaxsim.integrations.patching.patches import Patch
from pylate_fastmaxsim.integrations.patching.redirect import detached
from pylate_fastmaxsim.integrations.sentence_transformers.joint import Batch

_stock_transformer = detached(Transformer.forward)

# The model in training whose forward is running; None inside the check on the first batch.
_in_training: ContextVar[MultiVectorEncoder | None] = ContextVar("in_training", default=None)

# Forwards that treat each token by itself, or read attended tokens only.
_LEAVE_PADDING = {
    each.forward
    for each in (
        *(Dense, Normalize, MultiVectorMask, BaseTokenPooling, HierarchicalTokenPooling),
        *(Dropout, LayerNorm, Pooling, WordWeights, nn.Identity),
    )
}

# Features about texts that encoders do not take.
_TEXT_METADATA = {"modality", "task", "prompt_length"}

# Sentence Transformers adds it where it leaves padding out itself.
_FLATTENED = "cu_seq_lens_q"

_FLATTENED_APART = (
    "Sentence Transformers leaves padding out itself, and calls the encoder for each column of a batch. Load the model "
    'without attn_implementation="flash_attention_2" to have this package do so, in one call.'
)

# Sentence Transformers adds it to expanded queries, whose masked tokens are encoded.
_EXPANDED = "query_expansion_positions"

_widest: WeakKeyDictionary[Transformer, int] = WeakKeyDictionary()

_COUNTED = "processes of a distributed run may count the calls of checkpointed layers"

_PADDED = "Texts are encoded with padding, as stock Sentence Transformers does: %s."


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
        with setting(_in_training, self if self.training and current_options() is not None else None):
            return stock(self, *args, **kwargs)

    return call


called = _noting_training(detached(MultiVectorEncoder.__call__))
encode = _noting_training(detached(MultiVectorEncoder.forward))


@wraps(_stock_transformer)
def forward(self: Transformer, features: dict[str, Tensor], **kwargs) -> dict[str, Tensor]:
    if torch.compiler.is_compiling() or (model := _in_training.get()) is None:
        return _stock_transformer(self, features, **kwargs)
    with setting(_in_training, None):
        hidden = _without_padding(model, self, features, kwargs)
    if hidden is None:
        return _stock_transformer(self, features, **kwargs)
    features[self.module_output_name] = hidden
    return features


def _without_padding(
    model: MultiVectorEncoder, transformer: Transformer, features: dict[str, Tensor], kwargs: dict
) -> Tensor | None:
    """Hidden states ``[N, L, d]`` of padded texts; None if Sentence Transformers is to encode them."""
    options = current_options()
    if options is None:
        return None
    if _FLATTENED in features:
        if options.compile:
            log_once("compile=True does nothing: Sentence Transformers leaves padding out itself.", about=transformer)
        if options.padding_free:
            log_once(_FLATTENED_APART, about=transformer)
        return None
    # Before anything is encoded: checkpointing needs the same layers in forward and backward.
    if options.compile:
        _compile_layers(transformer)
    if not _has_texts(features) or not options.padding_free or _EXPANDED in features:
        return None
    batch = loss_columns.current()
    if batch is not None and (hidden := batch.take(transformer, features)) is not None:
        return hidden
    reason = _reason_in_features(transformer, features, kwargs) or _reason_in_transformer(transformer)
    if reason is None and options.padding_free != "always":
        reason = _reason_behind(model)
    if reason is not None:
        _say_padded(transformer, reason)
        return None
    columns = [_understood(features)]
    behind = () if batch is None else batch.behind(features)
    apart = _reason_apart(batch, model, transformer, behind) if behind else None
    if apart is None:
        columns += map(_understood, behind)
    backwards = encoding_gradcache.inside()
    mode = encoding_gradcache.replay(
        lambda: mode_for(
            transformer, _as_wide_as_ever(transformer, columns), None, backwards, host="Sentence Transformers"
        )
    )
    if mode == "padded":
        return None
    if mode == "packed" and apart is not None:
        log_once(APART, apart, about=transformer)
    if mode == "packed" and len(columns) > 1:
        documents = Documents.from_columns(columns)
        if not documents.gaps and loss_columns.are_few(documents):
            return batch.keep(transformer, documents, _packed(transformer, documents, features))
    documents = encoding_gradcache.replay(lambda: Documents.from_columns(columns[:1]), of_texts=True)
    if len(documents.token_index) == 0:
        return None
    if mode == "packed" and documents.gaps:
        reason = "one has a gap in its attention_mask"
    elif mode == "grouped" and _counts_calls(transformer):
        reason = _COUNTED
    if reason is not None:
        _say_padded(transformer, reason)
        return None
    encode_texts = _packed if mode == "packed" else _grouped
    states = encode_texts(transformer, documents, features)
    shape = features["input_ids"].shape
    return padded_again(states, documents.token_index, *shape, filler=states[:1])


def _packed(transformer: Transformer, documents: Documents, features: dict[str, Tensor]) -> Tensor:
    """Hidden states of the attended tokens, ``[T, d]``, from one call."""
    # Options that changed since GradCache's first pass have restored the attention function.
    accept_packed_masks(encoder_of(transformer))
    plan = packed_plan(*positioned(transformer, documents), nothing_skipped)
    return _states(transformer, plan, features)


def _grouped(transformer: Transformer, documents: Documents, features: dict[str, Tensor]) -> Tensor:
    """The same, from one call per group of texts of similar length."""
    plan = grouped_plan(documents, nothing_skipped, token_budget=None)
    text, place = documents.token_index // documents.max_length, documents.token_index % documents.max_length
    return _states(transformer, plan, features)[plan.starts[text] + place]


def _states(transformer: Transformer, plan: EncodingPlan, features: dict[str, Tensor]) -> Tensor:
    metadata = {key: features[key] for key in _TEXT_METADATA.intersection(features)}
    with uninspected():
        calls = [_stock_transformer(transformer, {**metadata, **call}) for call in plan.calls]
    return plan.batch([call[transformer.module_output_name] for call in calls]).values


def _understood(features: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: features[key] for key in UNDERSTOOD.intersection(features)}


def _reason_apart(
    batch: Batch,
    model: MultiVectorEncoder,
    transformer: Transformer,
    documents: Sequence[dict[str, Tensor]],
) -> str | None:
    """Why documents need calls of their own."""
    if not all(map(_has_texts, documents)):
        return "a column of documents has no texts"
    reasons = (_reason_in_features(transformer, each, {}) for each in documents)
    if (reason := next(filter(None, reasons), None)) is not None:
        return reason
    if _counts_calls(transformer):
        return _COUNTED
    return batch.reason_apart(model, transformer, known=(MultiVectorEncoder, Transformer))


def _has_texts(features: dict[str, Tensor]) -> bool:
    return {"input_ids", "attention_mask"} <= features.keys() and features["input_ids"].numel() > 0


def _say_padded(transformer: Transformer, reason: str) -> None:
    # DataParallel makes new copies in every step.
    log_once(_PADDED, reason, about=None if _is_copy(transformer) else transformer)


def _as_wide_as_ever(transformer: Transformer, columns: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """The texts, the first column padded to the widest one so far.

    A column is as wide as its longest text, so that narrow ones would be decided about anew.
    """
    width = max(column["input_ids"].shape[1] for column in columns)
    widest = _widest[transformer] = max(width, _widest.get(transformer, 0))
    if width == widest:
        return columns
    first = {key: F.pad(values, (0, widest - values.shape[1])) for key, values in columns[0].items()}
    return [first, *columns[1:]]


# This and the next function check what mode_for does not.
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
    if unknown := sorted((features.keys() - UNDERSTOOD - left | kwargs.keys()) - _TEXT_METADATA):
        return f"the encoder may take {', '.join(unknown)}"
    if _TEXT_METADATA & inputs_of(transformer):
        return f"the encoder takes {', '.join(sorted(_TEXT_METADATA & inputs_of(transformer)))}"
    return None


def _reason_in_transformer(transformer: Transformer) -> str | None:
    if _is_copy(transformer):
        return "DataParallel copies the model in every step; start the script with accelerate launch or torchrun"
    # Only with processes: to look at all modules takes a millisecond.
    if dist.is_available() and dist.is_initialized():
        if any(isinstance(module, (FullyShardedDataParallel, FSDPModule)) for module in transformer.modules()):
            return "FSDP divides the weights of the encoder"
        if divided_by_deepspeed(transformer):
            return "DeepSpeed divides the weights of the encoder (ZeRO 3)"
    if getattr(encoder_of(transformer).config, "output_hidden_states", False):
        return "it returns the hidden states of all layers"
    return None


def _reason_behind(model: MultiVectorEncoder) -> str | None:
    """Which module may read the states of padding, which differ from stock's."""
    module = _reader_of_padding(model)
    if module is None:
        return None
    return (
        f"{type(module).__name__} may read padding (if it treats each token by itself, switch on with "
        'padding_free="always")'
    )


def _reader_of_padding(model: MultiVectorEncoder) -> nn.Module | None:
    if unknown_part(type(model).forward) is not None:
        return model
    modules = list(model.children())
    for module in map(unwrap, modules):
        if type(module) in (Router, nn.ModuleDict, nn.Sequential):
            modules += module.children()
        elif not isinstance(module, Transformer) and not _leaves_padding(module):
            return module
    return None


def _leaves_padding(module: nn.Module) -> bool:
    return type(module).forward in _LEAVE_PADDING and has_class_forward(module)


def _compile_layers(transformer: Transformer) -> None:
    if _is_copy(transformer):
        log_once(
            "compile=True does nothing: DataParallel copies the layers in every step; start the script with accelerate "
            "launch or torchrun."
        )
        return
    compilation_layers.compile_layers(transformer)


def _is_copy(transformer: Transformer) -> bool:
    """Whether it is a copy that DataParallel made for one step."""
    return getattr(transformer, "_is_replica", False)


def _counts_calls(transformer: Transformer) -> bool:
    """Whether DistributedDataParallel may count the calls of checkpointed layers. Groups make more."""
    in_processes = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return in_processes and checkpoints_layers(transformer)
