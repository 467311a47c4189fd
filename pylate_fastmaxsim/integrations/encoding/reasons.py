"""Reasons to keep padding that are known without running the model."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DataParallel

from pylate_fastmaxsim.integrations.encoding.batch import column_has_gaps
from pylate_fastmaxsim.integrations.encoding.mode_cache import counts_checkpoints
from pylate_fastmaxsim.integrations.encoding.token_counts import TOKEN_TOTAL
from pylate_fastmaxsim.integrations.models.encoders import inputs_of
from pylate_fastmaxsim.integrations.models.user_code import custom_module, has_class_forward, user_code, user_wrapper
from pylate_fastmaxsim.integrations.models.wrappers import layers_of_wrapping
from pylate_fastmaxsim.integrations.options import current_options

# Features that are encoded without padding. An encoder that takes more is given padded texts.
UNDERSTOOD = {"input_ids", "attention_mask", "token_type_ids"}

GAP = "one has a gap in its attention_mask"

# Features that no encoder takes: token counts, and the keys of texts that are dictionaries, from PyLate's tokenizer.
_LEFT_OUT = {TOKEN_TOTAL, "text_keys"}


def reason_to_leave(model: nn.Module, columns: Sequence[dict[str, Tensor]]) -> str | None:
    """Why documents need padding whatever the encoder gives without it."""
    *around, core = layers_of_wrapping(model)
    if any(isinstance(layer, DataParallel) for layer in around):
        return "DataParallel splits a batch by rows; start the script with accelerate launch or torchrun"
    # The check on the first batch calls the model inside, and cannot see what a wrapper does with padding.
    if (wrapper := user_wrapper(model)) is not None:
        return f"{type(wrapper).__name__} is around the model"
    if not has_class_forward(core):
        return f"the forward of {type(core).__name__} was replaced"
    try:
        reason = reason_in_features(core, columns)
    except AttributeError:
        return f"{type(core).__name__} does not begin with a Transformer of Sentence Transformers"
    if reason is not None:
        return reason
    if counts_checkpoints(model):
        return "DistributedDataParallel with static_graph counts the calls of checkpointed layers"
    if getattr(core.tokenizer, "padding_side", "right") != "right":
        return "the tokenizer pads on the left"
    return _reason_in_training(core)


def reason_in_user_code(model: nn.Module, backwards: bool) -> str | None:
    """Which module or hook of the user's may depend on the other texts of a call."""
    options = current_options()
    if options is not None and options.padding_free == "always":
        return None
    found = user_code(model, backwards)
    return (
        found and f'{found}, and may not treat each text by itself (if it does, switch on with padding_free="always")'
    )


def reason_in_features(core: nn.Module, columns: Sequence[dict[str, Tensor]]) -> str | None:
    """Which features of the texts would be lost without padding."""
    more = not_carried(columns)
    unknown = more & inputs_of(core)
    if unknown:
        return f"the encoder is given {', '.join(sorted(unknown))}"
    if more and (module := custom_module(core)) is not None:
        return f"{type(module).__name__} may read {', '.join(sorted(more))}"
    return None


def reason_not_to_join(core: nn.Module, queries: dict[str, Tensor]) -> str | None:
    """Why queries need a call of their own."""
    length = queries["input_ids"].shape[1]
    if length > core.query_length:
        return f"they have {length} tokens, more than the model's query_length of {core.query_length}"
    if column_has_gaps(queries):
        return GAP
    return reason_in_features(core, [queries])


def not_carried(columns: Sequence[dict[str, Tensor]]) -> frozenset[str]:
    """Features of a batch that are not encoded without padding."""
    return frozenset().union(*columns) - UNDERSTOOD - _LEFT_OUT


def carried(features: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those that are."""
    return {key: features[key] for key in UNDERSTOOD.intersection(features)}


def _reason_in_training(core: nn.Module) -> str | None:
    """What in a model depends, in training, on all texts of a call."""
    for module in core.modules():
        if isinstance(module, _BatchNorm) and module.training:
            return f"{type(module).__name__} normalises by all tokens of a call"
        if module.training and getattr(module, "neftune_noise_alpha", None):
            return "NEFTune scales its noise by the width of a call"
    return None
