"""Encode texts without padding inside a model of Sentence Transformers: MultiVectorEncoder and SparseEncoder.

These models give a padded column of texts to a Transformer. A :class:`TransformerCall` stands in for what happens there.

Losses encode their queries and then their documents. With small batches a GPU waits for the host, which launches every
layer once per call. So the call for the queries encodes the documents as well, and later calls take theirs from the
:class:`LossColumns` of the loss.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import wraps

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pylate_fastmaxsim.integrations.compilation import layers as compilation_layers
from pylate_fastmaxsim.integrations.encoding import gradcache, graphs
from pylate_fastmaxsim.integrations.encoding.attention import accept_packed_masks
from pylate_fastmaxsim.integrations.encoding.batch import Documents
from pylate_fastmaxsim.integrations.encoding.masks import masks_unread
from pylate_fastmaxsim.integrations.encoding.modes import APART, GAP, MOST_TOKENS_BESIDE_QUERIES, UNDERSTOOD, understood
from pylate_fastmaxsim.integrations.encoding.plans import grouped_plan, packed_plan
from pylate_fastmaxsim.integrations.encoding.token_counts import take_total
from pylate_fastmaxsim.integrations.log import log_once
from pylate_fastmaxsim.integrations.models.context import setting
from pylate_fastmaxsim.integrations.models.encoders import checkpoints_layers, encoder_of, inputs_of
from pylate_fastmaxsim.integrations.models.user_code import reason_in_calls
from pylate_fastmaxsim.integrations.models.wrappers import (
    is_data_parallel_copy,
    layers_of_wrapping,
    sharded_by_deepspeed,
    sharded_by_fsdp,
)
from pylate_fastmaxsim.integrations.options import Options, current_options
from pylate_fastmaxsim.integrations.patching.patches import Patch, detached

Features = dict[str, Tensor]

# Sentence Transformers adds it where it leaves padding out itself.
FLATTENED = "cu_seq_lens_q"

# Features about texts that encoders do not take.
TEXT_METADATA = {"modality", "task", "prompt_length"}

_COUNTED = "processes of a distributed run may count the calls of checkpointed layers"

_FLATTENED_APART = (
    "Sentence Transformers leaves padding out itself, and calls the encoder for each column of a batch. Load the model "
    'without attn_implementation="flash_attention_2" to have this package do so, in one call.'
)

_PADDED = "Texts are encoded with padding, as stock Sentence Transformers does: %s."

# The model whose forward is running, and its keywords; None where Sentence Transformers is to encode.
_running: ContextVar[tuple[nn.Module, dict] | None] = ContextVar("running", default=None)

_columns: ContextVar[LossColumns | None] = ContextVar("columns", default=None)


def noting_model(model_class: type, accelerates: Callable[[nn.Module], bool] = lambda model: True) -> list[Patch]:
    """Calls of a model inside of which :func:`running_model` knows the model, if it ``accelerates``.

    Two: accelerate puts a forward on the instance for mixed precision, and a subclass may have its own.
    """

    def noting(stock: Callable) -> Callable:
        @wraps(stock)
        def call(self: nn.Module, *args, **kwargs) -> Features:
            if torch.compiler.is_compiling():
                return stock(self, *args, **kwargs)
            if args and isinstance(args[0], dict):
                take_total(args[0])  # of a loop of the user's, in which no trainer takes it out
            # A model compiled as a whole is left to stock: decisions about it cannot be traced.
            if self._compiled_call_impl is not None:
                return stock(self, *args, **kwargs)
            is_accelerated = current_options() is not None and accelerates(self)
            with setting(_running, (self, kwargs) if is_accelerated else None):
                return stock(self, *args, **kwargs)

        return call

    return [Patch(model_class, name, noting(detached(getattr(model_class, name)))) for name in ("__call__", "forward")]


def running_model(model_class: type[nn.Module]) -> tuple[nn.Module, dict] | None:
    """The model of a class whose forward is running, and its keywords."""
    running = None if torch.compiler.is_compiling() else _running.get()
    return running if running is not None and isinstance(running[0], model_class) else None


class LossColumns:
    """The columns of a loss that is running, and what is made already of texts that it has not asked for yet.

    ``model`` is what the loss calls, possibly wrapped.
    """

    def __init__(self, model: nn.Module, columns: Iterable[Features]) -> None:
        self.model, self.columns = model, list(columns)
        self._made: Tensor | None = None
        # Rows of each text in it.
        self._lengths: list[int] = []

    def documents(self, features: Features) -> list[Features]:
        """The columns of documents if ``features`` are the queries, else none."""
        queries = self.columns[0]
        are_queries = all(features.get(key) is queries.get(key) for key in ("input_ids", "attention_mask"))
        return self.columns[1:] if are_queries else []

    def keep(self, transformer: nn.Module, made: Tensor, lengths: list[int]) -> Tensor:
        """Keep the rows of all texts for later calls, and return those of the queries."""
        self._made, self._lengths, self._origin = made, lengths, _origin_of(transformer, made)
        return self._next(len(self.columns[0]["input_ids"]))

    def take(self, transformer: nn.Module, features: Features) -> Tensor | None:
        """Rows of the next texts, if these can be they."""
        if not self._lengths:
            return None
        count, width = features["input_ids"].shape
        lengths = self._lengths[:count]
        is_next = len(lengths) == count and max(lengths) <= width
        if is_next and self._origin == _origin_of(transformer, self._made):
            return self._next(count)
        self._made, self._lengths = None, []
        return None

    def _next(self, count: int) -> Tensor:
        rows = sum(self._lengths[:count])
        # Not slices: the backward of each would be as large as all.
        taken, self._made = self._made.split([rows, len(self._made) - rows])
        del self._lengths[:count]
        return taken


def _origin_of(transformer: nn.Module, made: Tensor) -> tuple:
    return transformer, torch.is_grad_enabled(), torch.is_autocast_enabled(made.device.type)


def noting_columns(loss_class: type, check: Callable[[nn.Module], None] = lambda loss: None) -> Patch:
    """The forward of a loss that notes its columns, after a ``check`` of the loss."""
    stock = detached(loss_class.forward)

    @wraps(stock)
    def forward(self: nn.Module, sentence_features: Iterable[Features], *args, **kwargs) -> Tensor:
        if torch.compiler.is_compiling() or current_options() is None:
            return stock(self, sentence_features, *args, **kwargs)
        check(self)
        columns = LossColumns(self.model, sentence_features)
        with noted(columns):
            return stock(self, columns.columns, *args, **kwargs)

    return Patch(loss_class, "forward", forward)


def noted(columns: LossColumns) -> AbstractContextManager[None]:
    """Context in which these are the columns of the loss that is running."""
    return setting(_columns, columns)


class TransformerCall(ABC):
    """A call of a Transformer, with padded texts ``[N, L]``, in a model that is running.

    A class for each kind of model says what it makes of hidden states, and when.
    """

    # Of the model and of the modules that it begins with, whose calls are left out for documents beside queries.
    known: tuple[type[nn.Module], ...]
    # Whether texts are also encoded here where they keep their padding.
    encodes_padding = False
    # The line of log where texts are left to stock.
    left_alone = _PADDED

    def __init__(self, model: nn.Module, transformer: nn.Module, features: Features, kwargs: dict) -> None:
        self.model, self.transformer = model, transformer
        self.features, self.kwargs = features, kwargs

    @property
    def encoder(self) -> nn.Module:
        """The module that gives hidden states."""
        return self.transformer

    @property
    def first_modules(self) -> list[nn.Module]:
        """The modules that the model has to begin with for documents to be encoded beside queries."""
        return [self.transformer]

    @abstractmethod
    def applies(self, options: Options) -> bool:
        """True if these texts are to be encoded here."""

    @abstractmethod
    def mode(self, columns: list[Features]) -> str:
        """The mode: "packed", "grouped" or "padded"."""

    @abstractmethod
    def call(self, features: Features) -> Tensor:
        """Hidden states ``[..., d]`` of one call of the encoder."""

    @abstractmethod
    def reason_in_output(self, features: Features) -> str | None:
        """Reason to leave the output of the Transformer to stock."""

    @abstractmethod
    def given_to_encoder(self, features: Features) -> set[str]:
        """Names of the features that may reach the encoder."""

    def reason_to_leave(self) -> str | None:
        """Reason to leave these texts to stock."""
        return self._reason_in_features(self.features, self.kwargs) or self._reason_in_transformer()

    def embed(self, documents: Documents, states: Tensor) -> Tensor:
        """Result for hidden states ``[T, d]`` of the attended tokens."""
        return states

    def lengths(self, documents: Documents) -> list[int]:
        """Rows of each text in what :meth:`embed` returns."""
        return documents.cu_seqlens.diff().tolist()

    def run(self) -> Tensor | None:
        """Result of the call; None if Sentence Transformers is to make it."""
        with setting(_running, None):
            options = current_options()
            return None if options is None else self._run(options, self.features)

    def _log(self, message: str, reason: str) -> None:
        # DataParallel makes new copies in every step.
        log_once(message, reason, about=None if is_data_parallel_copy(self.transformer) else self.transformer)

    def _run(self, options: Options, features: Features) -> Tensor | None:
        if FLATTENED in features:
            if options.compile:
                log_once(
                    "compile=True does nothing: Sentence Transformers leaves padding out itself.",
                    about=self.transformer,
                )
            if options.padding_free:
                log_once(_FLATTENED_APART, about=self.transformer)
            return None
        # Before anything is encoded: checkpointing needs the same layers in forward and backward.
        if options.compile and isinstance(encoder_of(self.transformer), nn.Module):
            compilation_layers.compile_layers(self.transformer)
            graphs.install(self.transformer)
        if not _has_texts(features):
            return None
        columns = _columns.get()
        if columns is not None and (made := columns.take(self.transformer, features)) is not None:
            return made
        if not self.applies(options):
            return None
        if (reason := self.reason_to_leave()) is not None:
            self._log(self.left_alone, reason)
            return None
        return self._make(columns)

    def _make(self, columns: LossColumns | None) -> Tensor | None:
        texts = [understood(self.features)]
        documents = [] if columns is None else columns.documents(self.features)
        apart = self._reason_apart(columns, documents) if documents else None
        if apart is None:
            texts += map(understood, documents)
        mode = gradcache.replay(lambda: self.mode(texts))
        if mode == "packed" and apart is not None:
            log_once(APART, apart, about=self.transformer)
        if mode == "packed" and len(texts) > 1:
            joint = Documents.from_columns(texts)
            if not joint.gaps and 0 < len(joint.token_index) <= MOST_TOKENS_BESIDE_QUERIES:
                made = self.embed(joint, self._packed_states(joint))
                return columns.keep(self.transformer, made, self.lengths(joint))
        if mode == "padded" and not self.encodes_padding:
            return None
        own = gradcache.replay(lambda: Documents.from_columns(texts[:1]), of_texts=True)
        states = self._states(own, mode)
        return None if states is None else self.embed(own, states)

    def _states(self, documents: Documents, mode: str) -> Tensor | None:
        """Hidden states ``[T, d]`` of the attended tokens."""
        reason = None
        if mode != "padded" and documents.gaps:
            reason = GAP
        elif mode == "grouped" and self._counts_calls():
            reason = _COUNTED
        if reason is not None:
            self._log(_PADDED, reason)
        elif mode != "padded" and len(documents.token_index):
            return self._packed_states(documents) if mode == "packed" else self._grouped_states(documents)
        return self.call(documents.column).flatten(0, 1)[documents.token_index] if self.encodes_padding else None

    def _packed_states(self, documents: Documents) -> Tensor:
        # Options that changed since GradCache's first pass have restored the attention function.
        accept_packed_masks(encoder_of(self.encoder))
        plan = packed_plan(self.encoder, documents)
        with masks_unread():
            return plan.batch(list(map(self.call, plan.calls))).values

    def _grouped_states(self, documents: Documents) -> Tensor:
        plan = grouped_plan(documents)
        text, place = documents.token_index // documents.max_length, documents.token_index % documents.max_length
        with masks_unread():
            return plan.batch(list(map(self.call, plan.calls))).values[plan.starts[text] + place]

    def _reason_in_transformer(self) -> str | None:
        """Reason to leave the Transformer to stock, whatever the texts are."""
        if is_data_parallel_copy(self.transformer):
            return "DataParallel copies the model in every step; start the script with accelerate launch or torchrun"
        # Only with processes: to look at all modules takes a millisecond.
        if dist.is_available() and dist.is_initialized():
            if sharded_by_fsdp(self.model):
                return "FSDP divides the weights of the model"
            if sharded_by_deepspeed(self.model):
                return "DeepSpeed divides the weights of the model (ZeRO 3)"
        if getattr(encoder_of(self.transformer).config, "output_hidden_states", False):
            return "it returns the hidden states of all layers"
        return None

    # Of what the choice of the mode does not look at.
    def _reason_in_features(self, features: Features, kwargs: dict) -> str | None:
        if (reason := self.reason_in_output(features)) is not None:
            return reason
        # Keywords replace features, also known ones.
        if unknown := sorted((self.given_to_encoder(features) - UNDERSTOOD | kwargs.keys()) - TEXT_METADATA):
            return f"the encoder may take {', '.join(unknown)}"
        # Before release 5.4 a Transformer passes nothing else on.
        has_inputs = hasattr(self.transformer, "model_forward_params")
        taken = sorted(TEXT_METADATA & inputs_of(self.transformer)) if has_inputs else None
        return f"the encoder takes {', '.join(taken)}" if taken else None

    def _reason_apart(self, columns: LossColumns, documents: Sequence[Features]) -> str | None:
        """Reason to encode documents apart from the queries."""
        if not all(map(_has_texts, documents)):
            return "a column of documents has no texts"
        reasons = (self._reason_in_features(each, {}) for each in documents)
        if (reason := next(filter(None, reasons), None)) is not None:
            return reason
        if self._counts_calls():
            return _COUNTED
        # Something may change documents before their own call.
        *around, core = layers_of_wrapping(columns.model)
        for layer in around:
            if not isinstance(layer, DistributedDataParallel):
                return f"{type(layer).__name__} is around the model"
        modules = self.first_modules
        if core is not self.model or list(core.children())[: len(modules)] != modules:
            return "the model does not begin with the encoder"
        # A subclass may have a __call__ or a forward of its own.
        own = next((module for module in (core, *modules) if type(module) not in self.known), None)
        return reason_in_calls([core, *modules]) if own is None else f"{type(own).__name__} is a class of your own"

    def _counts_calls(self) -> bool:
        """True if DistributedDataParallel may count the calls of checkpointed layers. Groups make more."""
        in_processes = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        return in_processes and checkpoints_layers(self.transformer)


def noise_outside(model: nn.Module, *parts: nn.Module) -> dict[str, Tensor]:
    """Noise in the place of the weights of a model that are in none of its parts, by name."""
    known = {id(weight) for part in parts for weight in part.parameters()}
    others = ((name, weight) for name, weight in model.named_parameters() if id(weight) not in known)
    return {name: torch.randn_like(weight) for name, weight in others if weight.is_floating_point()}


def _has_texts(features: Features) -> bool:
    return {"input_ids", "attention_mask"} <= features.keys() and features["input_ids"].numel() > 0
