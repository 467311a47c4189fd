"""Embed texts of a SPLADE model without vocabulary logits, and in training without padding.

A masked language model gives a logit for each token and each word of its vocabulary, of which SpladePooling keeps the
largest of each text. Here the encoder and the head up to its decoder run on attended tokens, and ``splade_pool`` takes
the maximum without the logits. ``token_embeddings``, where Sentence Transformers has them, are then not set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from functools import wraps

import torch
from sentence_transformers import SparseEncoder
from torch import Tensor, nn
from torch.nn import functional as F

from pylate_fastmaxsim.integrations.encoding import gradcache
from pylate_fastmaxsim.integrations.encoding.batch import Documents
from pylate_fastmaxsim.integrations.encoding.modes import APART, GAP, UNDERSTOOD, mode_for
from pylate_fastmaxsim.integrations.encoding.token_counts import take_total
from pylate_fastmaxsim.integrations.log import log_once
from pylate_fastmaxsim.integrations.models.context import setting
from pylate_fastmaxsim.integrations.models.encoders import encoder_of, inputs_of
from pylate_fastmaxsim.integrations.models.hidden_states import HiddenStates, hidden_states_of
from pylate_fastmaxsim.integrations.models.user_code import has_class_forward, has_hooks, has_user_hooks
from pylate_fastmaxsim.integrations.models.wrappers import is_compiled
from pylate_fastmaxsim.integrations.options import current_options
from pylate_fastmaxsim.integrations.patching.known_sources import not_known, unknown_part
from pylate_fastmaxsim.integrations.patching.patches import Patch
from pylate_fastmaxsim.integrations.patching.provenance import defined_in
from pylate_fastmaxsim.integrations.patching.redirect import detached
from pylate_fastmaxsim.integrations.sentence_transformers import loss_columns
from pylate_fastmaxsim.integrations.sentence_transformers.padding_free import (
    COUNTED,
    FLATTENED,
    TEXT_METADATA,
    as_wide_as_ever,
    compile_layers,
    counts_calls,
    grouped_states,
    has_texts,
    is_copy,
    packed_states,
    reason_in_transformer,
    say_flattened,
    say_padded,
    understood,
)
from pylate_fastmaxsim.integrations.sparse_encoder.heads import head_of, why_not
from pylate_fastmaxsim.integrations.sparse_encoder.names import (
    DIMENSION,
    LOGITS,
    MaskedLanguageModel,
    MLMTransformer,
    Router,
    SpladePooling,
    gives_logits,
)
from pylate_fastmaxsim.integrations.sparse_encoder.training import Batch
from pylate_fastmaxsim.ops.splade import splade_pool
from pylate_fastmaxsim.tokens import TokenBatch

_stock_call = detached(MaskedLanguageModel.__call__)
_stock_pooling = detached(SpladePooling.forward)

# The model whose forward is running; None inside the check on the first batch.
_running: ContextVar[SparseEncoder | None] = ContextVar("running", default=None)

# The feature that goes from the encoder to the pooling behind it.
_POOLED = "splade_embedding"

# On a CPU fewer tokens, padding included, cost less with their logits: splade_pool reads the vocabulary more than once.
# Measured at BERT-base's sizes on one core: with 160 tokens it takes 0.6 of stock's time forward, with 20 1.7.
FEW_TOKENS = 128

_LEFT_BEHIND = {"token_embeddings", "sentence_embedding", "text_keys"}

_LOGITS = "Vocabulary logits are computed for every token, as stock Sentence Transformers does: %s."


def patches() -> list[Patch]:
    """What to replace in Sentence Transformers."""
    return [
        # Both: accelerate puts a forward on the instance for mixed precision, and a subclass may have its own.
        Patch(SparseEncoder, "__call__", called),
        Patch(SparseEncoder, "forward", encode),
        # Its forward is replaced for MultiVectorEncoder.
        Patch(MaskedLanguageModel, "__call__", embed, needs=(MaskedLanguageModel.forward, SpladePooling.forward)),
        Patch(SpladePooling, "forward", pool),
    ]


def _noting_model(stock: Callable) -> Callable:
    """A call of a model that notes the model."""

    @wraps(stock)
    def call(self: SparseEncoder, *args, **kwargs) -> dict[str, Tensor]:
        if args and isinstance(args[0], dict) and not torch.compiler.is_compiling():
            take_total(args[0])  # of a loop of the user's, in which no trainer takes it out
        # A model compiled as a whole is left to stock: decisions about it cannot be traced.
        if torch.compiler.is_compiling() or self._compiled_call_impl is not None or current_options() is None:
            return stock(self, *args, **kwargs)
        with setting(_running, self):
            return stock(self, *args, **kwargs)

    return call


called = _noting_model(detached(SparseEncoder.__call__))
encode = _noting_model(detached(SparseEncoder.forward))


@wraps(_stock_call)
def embed(self: nn.Module, *args, **kwargs) -> dict[str, Tensor]:
    model = None if torch.compiler.is_compiling() else _running.get()
    if model is None or len(args) != 1 or not gives_logits(self):
        return _stock_call(self, *args, **kwargs)
    (features,) = args
    with setting(_running, None):
        pooled = _pooled(model, self, features, kwargs)
        if pooled is None:
            return _stock_call(self, *args, **kwargs)
    features[_POOLED] = pooled
    return features


@wraps(_stock_pooling)
def pool(self: SpladePooling, features: dict[str, Tensor]) -> dict[str, Tensor]:
    if _POOLED not in features:
        return _stock_pooling(self, features)
    features["sentence_embedding"] = pooled = features.pop(_POOLED)
    if getattr(self, DIMENSION) is None:
        setattr(self, DIMENSION, pooled.shape[1])
    return features


def _pooled(model: SparseEncoder, transformer: nn.Module, features: dict[str, Tensor], kwargs: dict) -> Tensor | None:
    """SPLADE embeddings ``[N, V]`` of padded texts; None if Sentence Transformers is to compute them."""
    options = current_options()
    if options is None:
        return None
    if FLATTENED in features:
        say_flattened(transformer, bool(options.padding_free), options.compile)
        return None
    if not has_texts(features):
        return None
    batch = loss_columns.current()
    batch = batch if isinstance(batch, Batch) else None
    if batch is not None and (pooled := batch.take(transformer, features)) is not None:
        return pooled
    # Before anything is encoded: checkpointing needs the same layers in forward and backward.
    if options.compile and isinstance(encoder_of(transformer), nn.Module):
        compile_layers(transformer)
    if _are_few(features["input_ids"]):
        return None
    reason = (
        _reason_in_model(model, transformer)
        or _reason_in_features(transformer, features, kwargs)
        or reason_in_transformer(transformer, model)
    )
    hidden = None
    if reason is None:
        hidden = hidden_states_of(transformer)
        reason = why_not(transformer, hidden, understood(features))
    if reason is not None:
        log_once(_LOGITS, reason, about=None if is_copy(transformer) else transformer)
        return None
    pooling = _behind(model, transformer)
    columns = [understood(features)]
    behind = () if batch is None else batch.behind(features)
    apart = _reason_apart(batch, model, transformer, pooling, behind) if behind else None
    if apart is None:
        columns += map(understood, behind)
    mode = gradcache.replay(lambda: _mode(hidden, columns))
    if mode == "packed" and apart is not None:
        log_once(APART, apart, about=transformer)
    if mode == "packed" and len(columns) > 1:
        documents = Documents.from_columns(columns)
        if not documents.gaps and loss_columns.are_few(documents):
            states = _states(transformer, hidden, documents, mode)
            return batch.keep(transformer, _pool(pooling, transformer, documents, states))
    documents = gradcache.replay(lambda: Documents.from_columns(columns[:1]), of_texts=True)
    return _pool(pooling, transformer, documents, _states(transformer, hidden, documents, mode))


def _are_few(input_ids: Tensor) -> bool:
    return input_ids.is_cpu and input_ids.numel() < FEW_TOKENS


def _mode(hidden: HiddenStates, columns: list[dict[str, Tensor]]) -> str:
    # encode() sorts texts by length, so that there is little padding, and comes in batches of any size.
    if not current_options().padding_free or torch.is_inference_mode_enabled():
        return "padded"
    columns = as_wide_as_ever(hidden, columns)
    return mode_for(hidden, columns, None, gradcache.inside(), host="Sentence Transformers")


def _states(transformer: nn.Module, hidden: HiddenStates, documents: Documents, mode: str) -> Tensor:
    """Hidden states of the attended tokens of texts, ``[T, d]``."""

    def call(features: dict[str, Tensor]) -> Tensor:
        return hidden(features)["token_embeddings"]

    reason = None
    if mode != "padded" and documents.gaps:
        reason = GAP
    elif mode == "grouped" and counts_calls(transformer):
        reason = COUNTED
    if reason is not None:
        say_padded(transformer, reason)
    elif mode != "padded" and len(documents.token_index):
        return packed_states(hidden, documents, call) if mode == "packed" else grouped_states(documents, call)
    return call(documents.column).flatten(0, 1)[documents.token_index]


def _reason_apart(
    batch: Batch,
    model: SparseEncoder,
    transformer: nn.Module,
    pooling: nn.Module,
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
    known = SparseEncoder, MaskedLanguageModel, MLMTransformer, SpladePooling
    return batch.reason_apart(model, transformer, pooling, known=known)


def _pool(pooling: SpladePooling, transformer: nn.Module, documents: Documents, states: Tensor) -> Tensor:
    """SPLADE embeddings ``[N, V]`` of texts, from hidden states of the encoder ``[T, d]``."""
    head = head_of(encoder_of(transformer))
    weight, bias = head.decoder.weight, head.decoder.bias
    offsets = documents.cu_seqlens.long()
    tokens = TokenBatch(head(states), offsets[:-1], offsets.diff(), documents.max_length, gapless=True)
    pooled = splade_pool(tokens, weight, bias, activation_function=pooling.activation_function)
    return pooled.to(_dtype_of_stock(tokens.values, weight, pooling.training))


@torch.no_grad()
def _dtype_of_stock(states: Tensor, weight: Tensor, training: bool) -> torch.dtype:
    """That of logits; in training of their logarithm, which autocast may compute in float32."""
    logits = F.linear(states[:0], weight[:0])
    return (logits.log1p() if training else logits).dtype


def _behind(model: SparseEncoder, transformer: nn.Module) -> nn.Module | None:
    """The module that is given what a Transformer returns, if there is one of them."""
    found = {id(module): module for module in _followers(list(model.children()), transformer)}
    return next(iter(found.values())) if len(found) == 1 else None


def _followers(
    modules: Sequence[nn.Module], transformer: nn.Module, behind: nn.Module | None = None
) -> Iterator[nn.Module | None]:
    for module, following in zip(modules, [*modules[1:], behind], strict=True):
        if module is transformer:
            yield following
        elif type(module) is Router:
            for route in module.sub_modules.values():
                yield from _followers(list(route), transformer, following)


def _outside_of_encoders(module: nn.Module) -> Iterator[nn.Module]:
    """The module and all in it, routes as well, which are given what the encoder returns."""
    yield module
    for child in module.children():
        if not isinstance(child, MaskedLanguageModel):
            yield from _outside_of_encoders(child)


def _reason_in_model(model: SparseEncoder, transformer: nn.Module) -> str | None:
    """Which part of a model Sentence Transformers has to run itself."""
    if not isinstance(encoder_of(transformer), nn.Module):  # exported, to ONNX or OpenVINO
        return f"{type(encoder_of(transformer)).__name__} is no module of PyTorch"
    pooling = _behind(model, transformer)
    if not isinstance(pooling, SpladePooling):
        return (
            f"{'no one module' if pooling is None else type(pooling).__name__} follows the encoder, not SpladePooling"
        )
    if pooling.pooling_strategy != "max":
        return f'SpladePooling has pooling_strategy="{pooling.pooling_strategy}"'
    for module in _outside_of_encoders(model):
        if has_user_hooks(module) or not has_class_forward(module):
            return f"a hook or another forward is on {type(module).__name__}"
    for module in (transformer, pooling):
        if has_hooks(module) or "forward" in vars(module) or is_compiled(module):
            return f"a hook or another forward is on {type(module).__name__}"
    for module, kind in ((model, SparseEncoder), (transformer, MaskedLanguageModel), (pooling, SpladePooling)):
        if type(module).forward is not kind.forward:
            return f"{type(module).__name__} has a forward of its own"
        if (part := unknown_part(kind.forward)) is not None:
            return not_known(part)
    module = pooling
    while (module := _behind(model, module)) is not None:
        if not defined_in(type(module).forward, ("sentence_transformers",)):
            return f"{type(module).__name__} may read them"
    return None


# This and reason_in_transformer check what mode_for does not.
def _reason_in_features(transformer: nn.Module, features: dict[str, Tensor], kwargs: dict) -> str | None:
    called = getattr(transformer, "modality_config", {"text": LOGITS}).get(features.get("modality", "text"), {})
    if called != LOGITS:
        return "its output is not the logits of each token"
    given = features.keys()
    if hasattr(transformer, "modality_config"):
        given -= _of_other_columns(given) - inputs_of(transformer)
    else:
        given &= UNDERSTOOD | {"inputs_embeds"}  # before release 5.4 nothing else goes on to the encoder
    # Keywords replace features, also known ones.
    if unknown := sorted((given - UNDERSTOOD - _LEFT_BEHIND | kwargs.keys()) - TEXT_METADATA):
        return f"the encoder may take {', '.join(unknown)}"
    taken = TEXT_METADATA & inputs_of(transformer) if hasattr(transformer, "model_forward_params") else set()
    return f"the encoder takes {', '.join(sorted(taken))}" if taken else None


def _of_other_columns(given: Iterable[str]) -> set[str]:
    """Features of ``negative_1`` that the trainer gives ``negative`` too, since their names begin with it."""
    others = tuple(key.removesuffix("input_ids") for key in given if key.endswith("_input_ids"))
    return {key for key in given if key.startswith(others)}
