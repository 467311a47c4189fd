"""Choose how a model encodes its texts, on its first batch: packed, grouped or padded, queries joined or apart.

A decision is made once, by each rank or by all ranks that have to make the same calls, and again when the model changes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import NoReturn, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DataParallel

from pylate_fastmaxsim.integrations.encoding.batch import Documents
from pylate_fastmaxsim.integrations.encoding.equivalence import (
    checked_width,
    reason_against_dividing,
    reason_against_groups,
    reason_against_joining,
    reason_against_packing,
    sample_documents,
)
from pylate_fastmaxsim.integrations.encoding.plans import EncodingPlan
from pylate_fastmaxsim.integrations.encoding.token_counts import TOKEN_TOTAL, has_gaps, known_total
from pylate_fastmaxsim.integrations.log import log_once
from pylate_fastmaxsim.integrations.models.encoders import (
    checkpoints_layers,
    encoder_of,
    inputs_of,
    is_packed_mask,
    with_adapters,
)
from pylate_fastmaxsim.integrations.models.user_code import custom_module, has_class_forward, user_code, user_wrapper
from pylate_fastmaxsim.integrations.models.wrappers import (
    group_in_step,
    layers_of_wrapping,
    least_of_all_ranks,
    unsharded,
    unwrap,
)
from pylate_fastmaxsim.integrations.options import current_options

# From what this rank found to what all ranks found.
Agree = Callable[[bool], bool]

Decision = TypeVar("Decision")

# Of each unwrapped model, by the state that it was decided in, and the widest batch that it holds for.
Decisions = WeakKeyDictionary[nn.Module, dict[tuple[Hashable, int], Decision]]

# "packed", "grouped" or "padded".
chosen: Decisions[str] = WeakKeyDictionary()

# Whether queries are encoded in the call of packed documents.
joined: Decisions[bool] = WeakKeyDictionary()

# Whether queries may be divided into calls otherwise than in stock PyLate.
divisible: Decisions[bool] = WeakKeyDictionary()

_PADDED = "Documents are encoded with padding, as stock {} does: %s."
_PACKED = "Documents are packed: the tokens of a batch back to back, without padding."
_GROUPED = "Documents are not packed but encoded in groups of similar length: %s."
APART = "Queries are not encoded with the documents but in a call of their own: %s."
_DIVIDED_AS_STOCK = "Queries are divided into calls as stock PyLate does: %s."

# Features that are encoded without padding. An encoder that takes more is given padded texts.
UNDERSTOOD = {"input_ids", "attention_mask", "token_type_ids"}

# Features that no encoder takes: token counts, and the keys of texts that are dictionaries, from PyLate's tokenizer.
_LEFT_OUT = {TOKEN_TOTAL, "text_keys"}

GAP = "one has a gap in its attention_mask"

# With more document tokens a GPU is busy while the host launches a call for the queries. Queries then cost less apart:
# FlashAttention starts as many blocks for every text of a call as the longest one needs.
MOST_TOKENS_BESIDE_QUERIES = 2**16


def mode_for(
    model: nn.Module,
    columns: Sequence[dict[str, Tensor]],
    group: dist.ProcessGroup | None,
    backwards: bool = False,
    host: str = "PyLate",
    whole: nn.Module | None = None,
    task: str | None = None,
    reason_behind: Callable[[Documents], str | None] = lambda samples: None,
) -> str:
    """Decide how a model encodes documents: "packed", "grouped" or "padded".

    The ranks of a ``group`` decide together. ``backwards``: whether each call has a backward of its own, as in GradCache.
    ``whole``: what the model is the encoder of, with a ``task`` that it may route by, and ``reason_behind``, which says
    why its modules behind the encoder need the states of padding.
    """
    whole_model = whole or model
    # A single process decides anew when hooks come or go. Several would all have to see the change.
    own_code = None if group else _reason_in_user_code(whole_model, backwards)

    def decide(agree: Agree) -> str:
        # Ranks agree on each check before the next one: a rank that runs a sharded model alone waits for ever.
        core, padded = unwrap(model), _PADDED.format(host)
        reason = _reason_to_leave(model, columns) or _reason_in_user_code(whole_model, backwards)
        if not _holds(core, agree, reason, padded):
            return "padded"
        samples = sample_documents(core, Documents.from_columns(columns))
        if not _holds(core, agree, reason_behind(samples), padded):
            return "padded"
        # On a CPU groups are the rule.
        level = logging.INFO if samples.input_ids.device.type == "cpu" else logging.WARNING
        if _holds(core, agree, reason_against_packing(core, samples), _GROUPED, level):
            log_once(_PACKED, level=logging.INFO, about=core)
            return "packed"
        return "grouped" if _holds(core, agree, reason_against_groups(core, samples), padded) else "padded"

    more = _varying_features(columns, group), backwards, own_code, task, whole and _state_of(whole)
    return _decided(chosen, model, columns, decide, group, more)


# Never traced, as plan_documents.
@torch.compiler.disable
def encodes_jointly(
    model: nn.Module, queries: dict[str, Tensor], columns: Sequence[dict[str, Tensor]], plan: EncodingPlan
) -> bool:
    """Decide whether the queries go into the call of the documents."""
    if not is_packed_mask(plan.calls[0]["attention_mask"]):
        return False
    core, group = unwrap(model), group_in_step(model)
    tokens = plan.calls[0]["input_ids"].shape[1]

    def decide(agree: Agree) -> bool:
        if not agree(tokens <= MOST_TOKENS_BESIDE_QUERIES):
            return False
        if not _holds(core, agree, _reason_against_queries(core, queries), APART):
            return False
        samples = sample_documents(core, Documents.from_columns(columns))
        return _holds(core, agree, reason_against_joining(core, samples, understood(queries)), APART)

    more = _varying_features(columns, group), core.query_length
    if not _decided(joined, model, columns, decide, group, more):
        return False
    reason = _reason_against_queries(core, queries)
    if reason is not None and group:
        _refuse(
            f"The queries of this batch need a call of their own, and those of earlier batches did not: {reason}.",
            "Leave out such queries",
        )
    return _holds(core, bool, reason, APART)


# Never traced, as plan_documents.
@torch.compiler.disable
def queries_can_be_divided(model: nn.Module, queries: dict[str, Tensor]) -> bool:
    """Decide whether a query gets the same embeddings whatever else is in its call."""
    core, group = unwrap(model), group_in_step(model, backwards=True)

    def decide(agree: Agree) -> bool:
        return _holds(core, agree, reason_against_dividing(core, understood(queries)), _DIVIDED_AS_STOCK)

    more = core.do_query_expansion, core.attend_to_expansion_tokens
    return _decided(divisible, model, [queries], decide, group, more)


def mode_with_gaps(model: nn.Module, mode: str, group: dist.ProcessGroup | None) -> str:
    """Choose the mode for documents with gaps in their masks, for a model that has this ``mode`` for others."""
    if group:
        _refuse(
            f"A document of this batch has a gap in its attention_mask and cannot be {mode}, as earlier batches were.",
            "Leave out such documents",
        )
    if mode == "packed":
        return "grouped"
    # transformers lets convolutions and recurrences read a masked token where a text is alone in its call.
    log_once(_PADDED.format("PyLate"), GAP, about=unwrap(model))
    return "padded"


def require_features_without_padding(model: nn.Module, columns: Sequence[dict[str, Tensor]]) -> None:
    """Refuse features that need padding, where all ranks decided without."""
    if (reason := _reason_in_features(unwrap(model), columns)) is not None:
        _refuse(
            f"The documents of this batch need padding, and those of earlier batches did not: {reason}.",
            "Give every batch the same features",
        )


def forget() -> None:
    """Decide anew about every model."""
    for decisions in (chosen, joined, divisible):
        decisions.clear()


def _refuse(found: str, advice: str) -> NoReturn:
    raise ValueError(f"{found} All processes must encode alike. {advice}, or train with enable(padding_free=False).")


def _holds(
    core: nn.Module, agree: Agree, reason_against: str | None, message: str, level: int = logging.WARNING
) -> bool:
    """Check that no rank has a reason against it. Logs the reason otherwise."""
    everywhere = agree(reason_against is None)
    if not everywhere:
        log_once(message, reason_against or "another process of this run needs it", level=level, about=core)
    return everywhere


def _decided(
    decisions: Decisions[Decision],
    model: nn.Module,
    columns: Sequence[dict[str, Tensor]],
    decide: Callable[[Agree], Decision],
    group: dist.ProcessGroup | None,
    more: Hashable,
) -> Decision:
    """The decision about a model in its present state, and in what else (``more``) it depends on, made at first use."""
    core = unwrap(model)
    device = columns[0]["input_ids"].device
    state = (
        # One rank may have used the model alone before all decide together.
        group is not None,
        *(type(layer) for layer in layers_of_wrapping(model)),
        _counts_checkpoints(model),
        core.training,
        device.type,
        torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type),
        # accelerate replaces this attribute for mixed precision. Users may replace it in every step.
        id(vars(core).get("forward")) if has_class_forward(core) else "replaced",
        *_state_of(core),
        more,
    )
    # Much wider batches may have longer documents than the check had. A rank must not decide about them alone.
    width = 0 if group else max(column["input_ids"].shape[1] for column in columns)
    found = decisions.setdefault(core, {})
    for (of_state, widest), decision in found.items():
        if of_state == state and width <= widest:
            return decision
    # The check makes a few calls of odd shapes, which are not worth compiling.
    with torch.compiler.set_stance("force_eager"):
        decision = decide(lambda here: bool(least_of_all_ranks(int(here), device, group)) if group else here)
    found[state, checked_width(width)] = decision
    return decision


def _state_of(core: nn.Module) -> tuple[Hashable, ...]:
    """State that users change in a model between batches.

    Its modules and, behind the encoder, all in them and which are in training; the encoder, PEFT around it, the dtype
    of its parameters, its attention, and NEFTune's noise.
    """
    children = list(unsharded(core).children())
    behind = [(ref(module), module.training) for child in children[1:] for module in child.modules()]
    try:
        encoder = encoder_of(core)
        noise = getattr(encoder.get_input_embeddings(), "neftune_noise_alpha", None)
        dtype = next(encoder.parameters()).dtype
        # PEFT may be wrapped around it later, and may put tokens before each text.
        around = ref(with_adapters(core))
        of_encoder = ref(encoder), around, encoder.training, dtype, encoder.config._attn_implementation, noise
    except (AttributeError, NotImplementedError, StopIteration):  # no encoder that could be packed
        of_encoder = ()
    # Weak references, not ids, which are used again after a module is gone.
    return *map(ref, children), *behind, *of_encoder


def _counts_checkpoints(model: nn.Module) -> bool:
    """Check whether DistributedDataParallel with ``static_graph`` counts the calls of layers that are checkpointed."""
    *around, core = layers_of_wrapping(model)
    if not any(getattr(layer, "static_graph", False) for layer in around):
        return False
    try:
        return checkpoints_layers(core)
    except AttributeError:  # no encoder that could be packed
        return False


# Reasons that are known without running the model.


def _reason_to_leave(model: nn.Module, columns: Sequence[dict[str, Tensor]]) -> str | None:
    """Reason to pad documents whatever the encoder gives without padding."""
    *around, core = layers_of_wrapping(model)
    if any(isinstance(layer, DataParallel) for layer in around):
        return "DataParallel splits a batch by rows; start the script with accelerate launch or torchrun"
    # The check on the first batch calls the model inside, and cannot see what a wrapper does with padding.
    if (wrapper := user_wrapper(model)) is not None:
        return f"{type(wrapper).__name__} is around the model"
    if not has_class_forward(core):
        return f"the forward of {type(core).__name__} was replaced"
    try:
        reason = _reason_in_features(core, columns)
    except AttributeError:
        return f"{type(core).__name__} does not begin with a Transformer of Sentence Transformers"
    if reason is not None:
        return reason
    if _counts_checkpoints(model):
        return "DistributedDataParallel with static_graph counts the calls of checkpointed layers"
    if getattr(core.tokenizer, "padding_side", "right") != "right":
        return "the tokenizer pads on the left"
    for module in core.modules():
        if isinstance(module, _BatchNorm) and module.training:
            return f"{type(module).__name__} normalises by all tokens of a call"
        if module.training and getattr(module, "neftune_noise_alpha", None):
            return "NEFTune scales its noise by the width of a call"
    return None


def _reason_in_user_code(model: nn.Module, backwards: bool) -> str | None:
    """Reason in a module or hook of the user's, which may depend on the other texts of a call."""
    options = current_options()
    if options is not None and options.padding_free == "always":
        return None
    found = user_code(model, backwards)
    return (
        found and f'{found}, and may not treat each text by itself (if it does, switch on with padding_free="always")'
    )


def _reason_in_features(core: nn.Module, columns: Sequence[dict[str, Tensor]]) -> str | None:
    """Reason in features of the texts that would be lost without padding."""
    more = _other_features(columns)
    unknown = more & inputs_of(core)
    if unknown:
        return f"the encoder is given {', '.join(sorted(unknown))}"
    if more and (module := custom_module(core)) is not None:
        return f"{type(module).__name__} may read {', '.join(sorted(more))}"
    return None


def _reason_against_queries(core: nn.Module, queries: dict[str, Tensor]) -> str | None:
    length = queries["input_ids"].shape[1]
    if length > core.query_length:
        return f"they have {length} tokens, more than the model's query_length of {core.query_length}"
    # Waits for the device if they have no token counts.
    if known_total(queries) is None and has_gaps(queries["attention_mask"]):
        return GAP
    return _reason_in_features(core, [queries])


def understood(features: dict[str, Tensor]) -> dict[str, Tensor]:
    """The features that are encoded without padding."""
    return {key: features[key] for key in UNDERSTOOD.intersection(features)}


def _other_features(columns: Sequence[dict[str, Tensor]]) -> frozenset[str]:
    return frozenset().union(*columns) - UNDERSTOOD - _LEFT_OUT


def _varying_features(columns: Sequence[dict[str, Tensor]], group: dist.ProcessGroup | None) -> frozenset[str]:
    """Features that only some batches may have. A rank must not decide about them without the others."""
    return frozenset() if group else _other_features(columns)
