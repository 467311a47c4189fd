"""Why a model, or the features of a batch, need padding."""

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

# What the plans without padding carry over; an encoder that is given more than this is left alone.
UNDERSTOOD = {"input_ids", "attention_mask", "token_type_ids"}

# What they leave out without a loss: what the patched collator adds, and what PyLate's tokenizer leaves of texts that
# are dictionaries.
_LEFT_OUT = {TOKEN_TOTAL, "text_keys"}


def reason_to_leave(model: nn.Module, columns: Sequence[dict[str, Tensor]]) -> str | None:
    *around, core = layers_of_wrapping(model)
    if any(isinstance(layer, DataParallel) for layer in around):
        return "DataParallel splits a batch by rows; start the script with accelerate launch or torchrun"
    # A trial calls the model as it is inside, and cannot know what these make of padding, or of more calls.
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
    options = current_options()
    if options is not None and options.padding_free == "always":
        return None
    found = user_code(model, backwards)
    return (
        found and f'{found}, and may not treat each text by itself (if it does, switch on with padding_free="always")'
    )


def reason_in_features(core: nn.Module, columns: Sequence[dict[str, Tensor]]) -> str | None:
    """Why texts need what the plans without padding do not carry over."""
    more = not_carried(columns)
    unknown = more & inputs_of(core)
    if unknown:
        return f"the encoder is given {', '.join(sorted(unknown))}"
    if more and (module := custom_module(core)) is not None:
        return f"{type(module).__name__} may read {', '.join(sorted(more))}"
    return None


def reason_not_to_join(core: nn.Module, queries: dict[str, Tensor]) -> str | None:
    length = queries["input_ids"].shape[1]
    if length > core.query_length:
        return f"they have {length} tokens, more than the model's query_length of {core.query_length}"
    if column_has_gaps(queries):
        return "one has a gap in its attention_mask"
    return reason_in_features(core, [queries])


def not_carried(columns: Sequence[dict[str, Tensor]]) -> frozenset[str]:
    return frozenset().union(*columns) - UNDERSTOOD - _LEFT_OUT


def carried(features: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: features[key] for key in UNDERSTOOD.intersection(features)}


def _reason_in_training(core: nn.Module) -> str | None:
    """What depends, in training, on how texts are divided into calls."""
    for module in core.modules():
        if isinstance(module, _BatchNorm) and module.training:
            return f"{type(module).__name__} normalises by all tokens of a call"
        if module.training and getattr(module, "neftune_noise_alpha", None):
            return "NEFTune scales its noise by the width of a call"
    return None
