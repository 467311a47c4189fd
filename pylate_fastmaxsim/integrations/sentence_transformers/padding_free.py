"""Hidden states of a padded column of texts, as Sentence Transformers gives one to a Transformer, without its padding."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn import functional as F

from pylate_fastmaxsim.integrations.compilation import layers as compilation_layers
from pylate_fastmaxsim.integrations.encoding import graphs
from pylate_fastmaxsim.integrations.encoding.attention import accept_packed_masks
from pylate_fastmaxsim.integrations.encoding.batch import Documents, positioned
from pylate_fastmaxsim.integrations.encoding.masks import uninspected
from pylate_fastmaxsim.integrations.encoding.modes import UNDERSTOOD
from pylate_fastmaxsim.integrations.encoding.plans import EncodingPlan, grouped_plan, nothing_skipped, packed_plan
from pylate_fastmaxsim.integrations.log import log_once
from pylate_fastmaxsim.integrations.models.encoders import checkpoints_layers, encoder_of
from pylate_fastmaxsim.integrations.models.wrappers import divided_by_deepspeed

Features = dict[str, Tensor]

# Makes one call of an encoder and returns its hidden states [..., d].
Call = Callable[[Features], Tensor]

# Features about texts that encoders do not take.
TEXT_METADATA = {"modality", "task", "prompt_length"}

# Sentence Transformers adds it where it leaves padding out itself.
FLATTENED = "cu_seq_lens_q"

COUNTED = "processes of a distributed run may count the calls of checkpointed layers"

_FLATTENED_APART = (
    "Sentence Transformers leaves padding out itself, and calls the encoder for each column of a batch. Load the model "
    'without attn_implementation="flash_attention_2" to have this package do so, in one call.'
)

_PADDED = "Texts are encoded with padding, as stock Sentence Transformers does: %s."

_widest: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


def has_texts(features: Features) -> bool:
    return {"input_ids", "attention_mask"} <= features.keys() and features["input_ids"].numel() > 0


def understood(features: Features) -> Features:
    """The features that are encoded without padding."""
    return {key: features[key] for key in UNDERSTOOD.intersection(features)}


def as_wide_as_ever(transformer: nn.Module, columns: list[Features]) -> list[Features]:
    """The texts, the first column padded to the widest one so far.

    A column is as wide as its longest text, so that narrow ones would be decided about anew.
    """
    width = max(column["input_ids"].shape[1] for column in columns)
    widest = _widest[transformer] = max(width, _widest.get(transformer, 0))
    if width == widest:
        return columns
    first = {key: F.pad(values, (0, widest - values.shape[1])) for key, values in columns[0].items()}
    return [first, *columns[1:]]


def packed_states(transformer: nn.Module, documents: Documents, call: Call) -> Tensor:
    """Hidden states of the attended tokens, ``[T, d]``, from one call."""
    # Options that changed since GradCache's first pass have restored the attention function.
    accept_packed_masks(encoder_of(transformer))
    return _states(packed_plan(*positioned(transformer, documents), nothing_skipped), call)


def grouped_states(documents: Documents, call: Call) -> Tensor:
    """The same, from one call per group of texts of similar length."""
    plan = grouped_plan(documents, nothing_skipped, token_budget=None)
    text, place = documents.token_index // documents.max_length, documents.token_index % documents.max_length
    return _states(plan, call)[plan.starts[text] + place]


def _states(plan: EncodingPlan, call: Call) -> Tensor:
    with uninspected():
        return plan.batch([call(features) for features in plan.calls]).values


def say_padded(transformer: nn.Module, reason: str) -> None:
    # DataParallel makes new copies in every step.
    log_once(_PADDED, reason, about=None if is_copy(transformer) else transformer)


def say_flattened(transformer: nn.Module, padding_free: bool, compiles: bool) -> None:
    """Say what Sentence Transformers does itself, of what was asked for."""
    if compiles:
        log_once("compile=True does nothing: Sentence Transformers leaves padding out itself.", about=transformer)
    if padding_free:
        log_once(_FLATTENED_APART, about=transformer)


def reason_in_transformer(transformer: nn.Module, model: nn.Module) -> str | None:
    """Why a Transformer of a model is encoded as stock does, whatever the texts are."""
    if is_copy(transformer):
        return "DataParallel copies the model in every step; start the script with accelerate launch or torchrun"
    # Only with processes: to look at all modules takes a millisecond.
    if dist.is_available() and dist.is_initialized():
        if any(isinstance(module, (FullyShardedDataParallel, FSDPModule)) for module in model.modules()):
            return "FSDP divides the weights of the model"
        if divided_by_deepspeed(model):
            return "DeepSpeed divides the weights of the model (ZeRO 3)"
    if getattr(encoder_of(transformer).config, "output_hidden_states", False):
        return "it returns the hidden states of all layers"
    return None


def compile_layers(transformer: nn.Module) -> None:
    if is_copy(transformer):
        log_once(
            "compile=True does nothing: DataParallel copies the layers in every step; start the script with accelerate "
            "launch or torchrun."
        )
        return
    compilation_layers.compile_layers(transformer)
    graphs.install(transformer)


def is_copy(transformer: nn.Module) -> bool:
    """Whether it is a copy that DataParallel made for one step."""
    return getattr(transformer, "_is_replica", False)


def counts_calls(transformer: nn.Module) -> bool:
    """Whether DistributedDataParallel may count the calls of checkpointed layers. Groups make more."""
    in_processes = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return in_processes and checkpoints_layers(transformer)
