"""Encode texts of a MultiVectorEncoder without padding in training and in ``encode``, and those of a loss in one call.

Only the encoder leaves the padding out. Its hidden states are padded again for what follows, as Sentence Transformers
does after FlashAttention: projection, masks and losses, also the user's own, are unchanged. Padding holds the state of a
token, not zeros. What a module makes of attended tokens must not change with it: a convolution or a mean over all tokens
of a text does. A model with such a module, or with code of the user's own, is encoded with padding.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from functools import wraps
from types import MethodType

import torch
from sentence_transformers.base.modules import Transformer
from sentence_transformers.multi_vector_encoder import MultiVectorEncoder
from sentence_transformers.multi_vector_encoder.losses import (
    CachedMultiVectorMultipleNegativesRankingLoss,
    MultiVectorDistillKLDivLoss,
    MultiVectorMarginMSELoss,
    MultiVectorMultipleNegativesRankingLoss,
)
from torch import Tensor, nn
from torch.func import functional_call

from pylate_fastmaxsim.integrations.encoding import gradcache
from pylate_fastmaxsim.integrations.encoding.attention import PackingUnsupported
from pylate_fastmaxsim.integrations.encoding.batch import Documents, attended_index, padded_again
from pylate_fastmaxsim.integrations.encoding.equivalence import Restoring, bitwise_equal, trial
from pylate_fastmaxsim.integrations.encoding.modes import mode_for
from pylate_fastmaxsim.integrations.log import log_once
from pylate_fastmaxsim.integrations.models.context import setting
from pylate_fastmaxsim.integrations.models.encoders import inputs_of
from pylate_fastmaxsim.integrations.options import Options
from pylate_fastmaxsim.integrations.patching.known_sources import defined_in
from pylate_fastmaxsim.integrations.patching.patches import Patch, detached
from pylate_fastmaxsim.integrations.sentence_transformers.padding_free import (
    TEXT_METADATA,
    Features,
    TransformerCall,
    noise_outside,
    noting_columns,
    noting_model,
    running_model,
)
from pylate_fastmaxsim.ops.score_metric import PooledScores

_stock_transformer = detached(Transformer.forward)

# Whether the check on the first batch is running.
_checking: ContextVar[bool] = ContextVar("checking", default=False)

# Whether `encode` is running.
_encoding: ContextVar[bool] = ContextVar("encoding", default=False)

# States of padding in the check, relative to those of tokens: so large that a maximum over tokens shows as well.
_LARGE = 10

# Sentence Transformers adds it to expanded queries, whose masked tokens are encoded.
_EXPANDED = "query_expansion_positions"

_LAST_STATES = (
    ("forward", "last_hidden_state", "token_embeddings"),
    ("forward", ("last_hidden_state",), "token_embeddings"),
)

# 32 passages of MS MARCO have some 2,560 tokens: a step of ModernBERT-base took about as long as in stock. With 9,600
# tokens it was more than 3 times as fast. Where in between a GPU has enough to do depends on encoder and host.
_FEW_TOKENS = 4096

_FEW = (
    "Mini-batches of %s texts hold few tokens without padding, so the GPU may wait for the host. To fill them, give the "
    "loss mini_batch_num_tokens; %s times document_length is what padded ones hold."
)

_OF_OWN_DOCUMENTS = (MultiVectorDistillKLDivLoss, MultiVectorMarginMSELoss)


def patches() -> list[Patch]:
    """Replacements in Sentence Transformers."""
    return [
        *_CALLS,
        Patch(Transformer, "forward", forward),
        *_OF_LOSSES,
    ]


def without_padding() -> AbstractContextManager[None]:
    """Context in which a model that is not in training leaves padding out as well."""
    return setting(_encoding, True)


def _leaves_padding_out(model: MultiVectorEncoder) -> bool:
    return (model.training or _encoding.get()) and not _checking.get()


_CALLS = noting_model(MultiVectorEncoder, _leaves_padding_out)


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
        task = self._model_kwargs.get("task")
        mode = mode_for(
            self.transformer,
            columns,
            None,
            gradcache.inside(),
            host="Sentence Transformers",
            whole=self.model,
            task=task,
            reason_behind=self._reason_behind,
        )
        # Sorted by length, texts of a batch need no groups.
        return "padded" if mode == "grouped" and _encoding.get() else mode

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
        """Name the part of the model that reads the states of padding, as a part of a sentence; None if none does.

        The model runs as it is, in training, on the same random numbers each time: with the encoder's states and with
        others in the place of padding; then again with noise as the weights behind the encoder, since a convolution whose
        weights are 0 now may be trained. Some of the texts have padding.
        """
        features = {**self._metadata, **samples.column}
        padding = features["attention_mask"][..., None] == 0
        otherwise = "the model cannot be run with other states of padding ({})"
        with setting(_checking, True), trial(padding.device, otherwise) as found:
            for weights in ({}, noise_outside(self.model, self.transformer)):
                states, expected = self._made(features, weights)
                others = torch.where(padding, _LARGE * states.flip(0, 1), states)
                _, made = self._made(features, weights, others)
                for module, output in expected.items():
                    same_keys = output.keys() == made[module].keys()
                    if not (same_keys and all(bitwise_equal(made[module][key], output[key]) for key in output)):
                        raise PackingUnsupported(f"{type(module).__name__} reads the states of padding")
        return found.reason

    def _made(
        self, features: Features, weights: dict[str, Tensor], states: Tensor | None = None
    ) -> tuple[Tensor, dict[nn.Module, dict[str, Tensor]]]:
        """Hidden states ``[N, L, d]``, or others in their place, and what each module makes of attended tokens."""
        model, name, device = self.model, self.transformer.module_output_name, features["input_ids"].device
        made: dict[nn.Module, dict[str, Tensor]] = {}
        encoded: list[Tensor] = []

        def replace(_module: nn.Module, _args: tuple, output: dict[str, Tensor]) -> None:
            output[name] = output[name] if states is None else states
            encoded.append(output[name].clone())

        def record(module: nn.Module, _args: tuple, output: dict[str, Tensor]) -> None:
            mask = output["attention_mask"] != 0
            made[module] = {
                key: (value[mask] if value.shape[:2] == mask.shape else value).clone()
                for key, value in output.items()
                if torch.is_tensor(value)
            }

        with ExitStack() as stack:
            stack.enter_context(Restoring(model))
            stack.enter_context(_inside_of_accelerate(model))
            stack.enter_context(torch.no_grad())
            stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
            # Reentrant checkpointing warns of inputs without gradients.
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")
            stack.callback(self.transformer.register_forward_hook(replace).remove)
            for module in (*model.children(), model):
                stack.callback(module.register_forward_hook(record).remove)
            # Copies of buffers: to write to those that batch norm has would break a backward that is still to come.
            buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
            # Tied, weights of a module that stands in two routes would be replaced twice, and put back once.
            functional_call(model, {**buffers, **weights}, (dict(features),), self._model_kwargs, tie_weights=False)
        return encoded[0], made


@contextmanager
def _inside_of_accelerate(model: nn.Module) -> Iterator[None]:
    """Context in which a model has the forward inside the one that accelerate gave it.

    That one is running, and its autocast is one object: entered twice, it would stay on.
    """
    inner = prepared = vars(model).get("forward")
    while defined_in(inner, ("accelerate", "torch")) and hasattr(inner, "__wrapped__"):
        inner = inner.__wrapped__
    if inner is prepared:
        yield
        return
    model.forward = MethodType(inner, model) if isinstance(prepared, MethodType) else inner
    try:
        yield
    finally:
        model.forward = prepared


def _check_metric(loss: nn.Module) -> None:
    """Raise ValueError where a loss has :class:`PooledScores` that score other documents than it takes.

    A margin of scores against all documents would be broadcast, and give a loss that means nothing.
    """
    metric, own = loss.similarity_fct, isinstance(loss, _OF_OWN_DOCUMENTS)
    if isinstance(metric, PooledScores) and metric.own_documents != own:
        documents = "its own documents" if own else "all documents of the batch"
        raise ValueError(
            f"{type(loss).__name__} scores each query against {documents}, so its similarity_fct must be "
            f"PooledScores(..., own_documents={own}), got {metric}."
        )


def _recommend_tokens(loss: nn.Module, features: dict[str, object], found: list[object]) -> None:
    """Log how to fill mini-batches that keep a GPU waiting, of which stock's default of 32 texts is one."""
    packed = next((each for each in found if isinstance(each, Documents)), None)
    # Queries are short, and divided as documents are.
    if packed is None or "packed" not in found or features.get("task") == "query":
        return
    is_part = loss.mini_batch_num_tokens is None and len(packed) < len(features["input_ids"])
    if is_part and len(packed.token_index) < _FEW_TOKENS and packed.input_ids.is_cuda:
        log_once(_FEW, loss.mini_batch_size, loss.mini_batch_size, about=loss.model)


_OF_LOSSES = [
    *(noting_columns(loss, _check_metric) for loss in (MultiVectorMultipleNegativesRankingLoss, *_OF_OWN_DOCUMENTS)),
    *gradcache.two_passes(CachedMultiVectorMultipleNegativesRankingLoss, _check_metric, _recommend_tokens),
]
