"""Embed texts of a SPLADE model without vocabulary logits, and in training without padding.

A masked language model gives a logit for each token and each word of its vocabulary, of which SpladePooling keeps the
largest of each text. Here the encoder and the head up to its decoder run on attended tokens, and ``splade_pool`` takes
the maximum without the logits. ``token_embeddings``, where Sentence Transformers has them, are then not set.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property, wraps

import torch
from sentence_transformers import SparseEncoder
from sentence_transformers.sparse_encoder import SparseEncoderTrainer, losses
from sentence_transformers.sparse_encoder.data_collator import SparseEncoderDataCollator
from torch import Tensor, nn
from torch.nn import functional as F

from pylate_fastmaxsim.integrations.encoding import gradcache
from pylate_fastmaxsim.integrations.encoding.batch import Documents
from pylate_fastmaxsim.integrations.encoding.modes import UNDERSTOOD, mode_for, understood
from pylate_fastmaxsim.integrations.encoding.token_counts import counting_tokens_of_batches
from pylate_fastmaxsim.integrations.models.encoders import HiddenStates, encoder_of, hidden_states_of, inputs_of
from pylate_fastmaxsim.integrations.models.user_code import has_hooks, reason_in_calls
from pylate_fastmaxsim.integrations.models.wrappers import is_compiled
from pylate_fastmaxsim.integrations.options import Options, current_options
from pylate_fastmaxsim.integrations.patching.known_sources import defined_in, not_known, unknown_part
from pylate_fastmaxsim.integrations.patching.patches import Patch, detached
from pylate_fastmaxsim.integrations.sentence_transformers.padding_free import (
    Features,
    TransformerCall,
    noting_columns,
    noting_model,
    running_model,
)
from pylate_fastmaxsim.integrations.sparse_encoder.heads import head_of, reason_to_compute_logits
from pylate_fastmaxsim.integrations.sparse_encoder.names import (
    DIMENSION,
    LOGITS,
    MaskedLanguageModel,
    MLMTransformer,
    Router,
    SpladePooling,
    gives_logits,
)
from pylate_fastmaxsim.ops.splade import splade_pool
from pylate_fastmaxsim.tokens import TokenBatch

_stock_call = detached(MaskedLanguageModel.__call__)
_stock_pooling = detached(SpladePooling.forward)

# The feature that goes from the encoder to the pooling behind it.
_POOLED = "splade_embedding"

# On a CPU fewer tokens, padding included, cost less with their logits: splade_pool reads the vocabulary more than once.
# Measured at BERT-base's sizes on one core: with 160 tokens it takes 0.6 of stock's time forward, with 20 1.7.
FEW_TOKENS = 128

_LEFT_BEHIND = {"token_embeddings", "sentence_embedding", "text_keys"}

# Token counts, all columns of a loss in one call, and GradCache's two passes alike.
_TRAINING = [
    noting_columns(losses.SpladeLoss),
    *counting_tokens_of_batches(SparseEncoderDataCollator, SparseEncoderTrainer, by_rank=False),
]
if hasattr(losses, "CachedSpladeLoss"):  # from release 5.3 on
    _TRAINING += gradcache.two_passes(losses.CachedSpladeLoss)


def patches() -> list[Patch]:
    """Replacements in Sentence Transformers."""
    return [
        *_CALLS,
        # Its forward is replaced for MultiVectorEncoder.
        Patch(MaskedLanguageModel, "__call__", embed, needs=(MaskedLanguageModel.forward, SpladePooling.forward)),
        Patch(SpladePooling, "forward", pool),
        *_TRAINING,
    ]


_CALLS = noting_model(SparseEncoder)


@wraps(_stock_call)
def embed(self: nn.Module, *args, **kwargs) -> Features:
    running = running_model(SparseEncoder)
    if running is None or len(args) != 1 or not gives_logits(self):
        return _stock_call(self, *args, **kwargs)
    (features,) = args
    pooled = _Call(running[0], self, features, kwargs).run()
    if pooled is None:
        return _stock_call(self, *args, **kwargs)
    features[_POOLED] = pooled
    return features


@wraps(_stock_pooling)
def pool(self: SpladePooling, features: Features) -> Features:
    if _POOLED not in features:
        return _stock_pooling(self, features)
    features["sentence_embedding"] = pooled = features.pop(_POOLED)
    if getattr(self, DIMENSION) is None:
        setattr(self, DIMENSION, pooled.shape[1])
    return features


class _Call(TransformerCall):
    """A call that makes SPLADE embeddings ``[N, V]``, from hidden states of the attended tokens."""

    known = SparseEncoder, MaskedLanguageModel, MLMTransformer, SpladePooling
    encodes_padding = True
    left_alone = "Vocabulary logits are computed for every token, as stock Sentence Transformers does: %s."

    @property
    def encoder(self) -> HiddenStates:
        return hidden_states_of(self.transformer)

    @cached_property
    def pooling(self) -> nn.Module | None:
        return _behind(self.model, self.transformer)

    @property
    def first_modules(self) -> list[nn.Module]:
        return [self.transformer, self.pooling]

    def applies(self, options: Options) -> bool:
        input_ids = self.features["input_ids"]
        return not input_ids.is_cpu or input_ids.numel() >= FEW_TOKENS

    def mode(self, columns: list[Features]) -> str:
        # encode() sorts texts by length, so that there is little padding, and comes in batches of any size.
        if not current_options().padding_free or torch.is_inference_mode_enabled():
            return "padded"
        return mode_for(self.encoder, columns, None, gradcache.inside(), host="Sentence Transformers")

    def call(self, features: Features) -> Tensor:
        return self.encoder(features)["token_embeddings"]

    def reason_to_leave(self) -> str | None:
        return (
            _reason_in_modules(self.model, self.transformer, self.pooling)
            or super().reason_to_leave()
            or reason_to_compute_logits(self.transformer, self.encoder, understood(self.features))
        )

    def reason_in_output(self, features: Features) -> str | None:
        outputs = getattr(self.transformer, "modality_config", {"text": LOGITS})
        is_logits = outputs.get(features.get("modality", "text"), {}) == LOGITS
        return None if is_logits else "its output is not the logits of each token"

    def given_to_encoder(self, features: Features) -> set[str]:
        if not hasattr(self.transformer, "modality_config"):
            return features.keys() & (UNDERSTOOD | {"inputs_embeds"})  # before release 5.4 nothing else goes on to it
        # Features of `negative_1` that the trainer gives `negative` too, since their names begin with it.
        columns = tuple(key.removesuffix("input_ids") for key in features if key.endswith("_input_ids"))
        others = {key for key in features if key.startswith(columns)}
        return features.keys() - (others - inputs_of(self.transformer)) - _LEFT_BEHIND

    def embed(self, documents: Documents, states: Tensor) -> Tensor:
        head = head_of(encoder_of(self.transformer))
        weight, bias = head.decoder.weight, head.decoder.bias
        offsets = documents.cu_seqlens.long()
        tokens = TokenBatch(head(states), offsets[:-1], offsets.diff(), documents.max_length, gapless=True)
        pooled = splade_pool(tokens, weight, bias, activation_function=self.pooling.activation_function)
        return pooled.to(_dtype_of_stock(tokens.values, weight, self.pooling.training))

    def lengths(self, documents: Documents) -> list[int]:
        return [1] * len(documents)


@torch.no_grad()
def _dtype_of_stock(states: Tensor, weight: Tensor, training: bool) -> torch.dtype:
    """Dtype of logits; in training of their logarithm, which autocast may compute in float32."""
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


def _reason_in_modules(model: SparseEncoder, transformer: nn.Module, pooling: nn.Module | None) -> str | None:
    if not isinstance(encoder_of(transformer), nn.Module):  # exported, to ONNX or OpenVINO
        return f"{type(encoder_of(transformer)).__name__} is no module of PyTorch"
    if not isinstance(pooling, SpladePooling):
        return (
            f"{'no one module' if pooling is None else type(pooling).__name__} follows the encoder, not SpladePooling"
        )
    if pooling.pooling_strategy != "max":
        return f'SpladePooling has pooling_strategy="{pooling.pooling_strategy}"'
    if (reason := reason_in_calls(_outside_of_encoders(model))) is not None:
        return reason
    for module in (transformer, pooling):
        if has_hooks(module) or "forward" in vars(module) or is_compiled(module):
            return f"a hook or another forward is on {type(module).__name__}"
    for module, stock in ((model, SparseEncoder), (transformer, MaskedLanguageModel), (pooling, SpladePooling)):
        if type(module).forward is not stock.forward:
            return f"{type(module).__name__} has a forward of its own"
        if (part := unknown_part(stock.forward)) is not None:
            return not_known(part)
    module = pooling
    while (module := _behind(model, module)) is not None:
        if not defined_in(type(module).forward, ("sentence_transformers",)):
            return f"{type(module).__name__} may read them"
    return None
