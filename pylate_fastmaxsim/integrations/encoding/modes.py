"""Choose how a model encodes its texts, on its first batch: packed, grouped or padded, queries joined or apart."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TypeVar
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DataParallel

from pylate_fastmaxsim.integrations.encoding.attention import is_packed_mask
from pylate_fastmaxsim.integrations.encoding.batch import Documents, column_has_gaps
from pylate_fastmaxsim.integrations.encoding.equivalence import (
    holds_up_to,
    short_to_long,
    why_not_divided,
    why_not_grouped,
    why_not_joint,
    why_not_packed,
)
from pylate_fastmaxsim.integrations.encoding.plans import EncodingPlan
from pylate_fastmaxsim.integrations.encoding.token_counts import TOKEN_TOTAL
from pylate_fastmaxsim.integrations.log import log_once
from pylate_fastmaxsim.integrations.models.encoders import checkpoints_layers, encoder_of, inputs_of, with_adapters
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

# A decision is made again if one part of its key changes.
Decisions = WeakKeyDictionary[nn.Module, dict[Hashable, Decision]]

# "packed", "grouped" or "padded".
chosen: Decisions[str] = WeakKeyDictionary()

# Whether queries are encoded in the call of packed documents.
joined: Decisions[bool] = WeakKeyDictionary()

# Whether queries may be divided into calls otherwise than in stock PyLate.
divisible: Decisions[bool] = WeakKeyDictionary()

_PADDED = "Documents are encoded with padding, as stock {} does: %s."

APART = "Queries are not encoded with the documents but in a call of their own: %s."

_DIVIDED_AS_STOCK = "Queries are divided into calls as stock PyLate does: %s."

# Features that are encoded without padding. An encoder that takes more is given padded texts.
UNDERSTOOD = {"input_ids", "attention_mask", "token_type_ids"}

GAP = "one has a gap in its attention_mask"

# Features that no encoder takes: token counts, and the keys of texts that are dictionaries, from PyLate's tokenizer.
_LEFT_OUT = {TOKEN_TOTAL, "text_keys"}

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
    why_not_behind: Callable[[Documents], str | None] = lambda samples: None,
) -> str:
    """The mode of a model.

    ``backwards``: whether each call has a backward of its own, as in GradCache. ``whole``: what the model is the
    encoder of, and ``why_not_behind`` says why its modules behind the encoder need the states of padding, for a
    ``task`` that it may route by.
    """
    # A single process decides anew when hooks come or go. Several would all have to see the change.
    own = None if group else reason_in_user_code(whole or model, backwards)
    decide = partial(_fastest_mode, model, whole or model, columns, backwards, _PADDED.format(host), why_not_behind)
    more = _features_that_differ(columns, group), backwards, own, task, whole and state_of(whole)
    return decided(chosen, model, columns, decide, group, more)


# Never traced, as plan_documents.
@torch.compiler.disable
def joins(
    model: nn.Module, queries: dict[str, Tensor], columns: Sequence[dict[str, Tensor]], plan: EncodingPlan
) -> bool:
    """Whether the queries go into the call of the documents."""
    if not is_packed_mask(plan.calls[0]["attention_mask"]):
        return False
    core, group = unwrap(model), group_in_step(model)
    tokens = plan.calls[0]["input_ids"].shape[1]
    decide = partial(_should_join, model, queries, columns, tokens)
    more = _features_that_differ(columns, group), core.query_length
    if not decided(joined, model, columns, decide, group, more):
        return False
    reason = reason_not_to_join(core, queries)
    if reason is not None and group:
        raise ValueError(
            f"The queries of this batch need a call of their own, and those of earlier batches did not: {reason}. All "
            "processes must encode alike. Leave out such queries, or train with enable(padding_free=False)."
        )
    return _works(core, bool, reason, APART)


# Never traced, as plan_documents.
@torch.compiler.disable
def can_be_divided(model: nn.Module, queries: dict[str, Tensor]) -> bool:
    """Whether a query gets the same embeddings whatever else is in its call."""
    core, group = unwrap(model), group_in_step(model, backwards=True)
    more = core.do_query_expansion, core.attend_to_expansion_tokens

    def decide(agree: Agree) -> bool:
        return _works(core, agree, why_not_divided(core, carried(queries)), _DIVIDED_AS_STOCK)

    return decided(divisible, model, [queries], decide, group, more)


def mode_with_gaps(model: nn.Module, mode: str, group: dist.ProcessGroup | None) -> str:
    """The mode for documents with gaps in their attention masks, for a model that has this ``mode`` for others."""
    if group:
        raise ValueError(
            f"A document of this batch has a gap in its attention_mask and cannot be {mode}, as earlier batches were. "
            "All processes must encode alike. Leave out such documents, or train with enable(padding_free=False)."
        )
    if mode == "packed":
        return "grouped"
    # transformers lets convolutions and recurrences read a masked token where a text is alone in its call.
    log_once(_PADDED.format("PyLate"), GAP, about=unwrap(model))
    return "padded"


def forget() -> None:
    """Decide anew about every model."""
    for decisions in (chosen, joined, divisible):
        decisions.clear()


def _fastest_mode(
    model: nn.Module,
    whole: nn.Module,
    columns: Sequence[dict[str, Tensor]],
    backwards: bool,
    padded: str,
    why_not_behind: Callable[[Documents], str | None],
    agree: Agree,
) -> str:
    """The first mode that works on all ranks.

    They agree on each check before the next one: a rank that runs a sharded model alone waits for ever.
    """
    core = unwrap(model)
    works = partial(_works, core, agree)
    if not works(reason_to_leave(model, columns) or reason_in_user_code(whole, backwards), padded):
        return "padded"
    samples = short_to_long(core, Documents.from_columns(columns))
    if not works(why_not_behind(samples), padded):
        return "padded"
    if works(
        why_not_packed(core, samples),
        "Documents are not packed but encoded in groups of similar length: %s.",
        # On a CPU this is the rule.
        logging.INFO if samples.input_ids.device.type == "cpu" else logging.WARNING,
    ):
        return "packed"
    return "grouped" if works(why_not_grouped(core, samples), padded) else "padded"


def _should_join(
    model: nn.Module, queries: dict[str, Tensor], columns: Sequence[dict[str, Tensor]], tokens: int, agree: Agree
) -> bool:
    core = unwrap(model)
    if not agree(tokens <= MOST_TOKENS_BESIDE_QUERIES):
        return False
    if not _works(core, agree, reason_not_to_join(core, queries), APART):
        return False
    samples = short_to_long(core, Documents.from_columns(columns))
    return _works(core, agree, why_not_joint(core, samples, carried(queries)), APART)


def _works(
    core: nn.Module, agree: Agree, reason_not_to: str | None, message: str, level: int = logging.WARNING
) -> bool:
    """Whether no rank has a reason not to. Logs the reason otherwise."""
    everywhere = agree(reason_not_to is None)
    if not everywhere:
        reason = reason_not_to or "another process of this run needs it"
        log_once(message, reason, level=level, about=core)
    return everywhere


def _features_that_differ(columns: Sequence[dict[str, Tensor]], group: dist.ProcessGroup | None) -> frozenset[str]:
    """Features that only some batches may have. A rank must not decide about them without the others."""
    return frozenset() if group else not_carried(columns)


def decided(
    decisions: Decisions[Decision],
    model: nn.Module,
    columns: Sequence[dict[str, Tensor]],
    decide: Callable[[Agree], Decision],
    group: dist.ProcessGroup | None,
    more: Hashable,
) -> Decision:
    """The decision about a model in its present state, made at first use.

    Parameters
    ----------
    decisions
        Those made so far, by unwrapped model.
    model
        A ``pylate.models.ColBERT``, possibly wrapped.
    columns
        The tokenized texts that it is given.
    decide
        Makes the decision, given a function to agree with the other ranks.
    group
        The ranks that decide together; ``None`` if each decides by itself.
    more
        What else the decision depends on.
    """
    core = unwrap(model)
    device = columns[0]["input_ids"].device
    situation = (
        # One rank may have used the model alone before all decide together.
        group is not None,
        *(type(layer) for layer in layers_of_wrapping(model)),
        counts_checkpoints(model),
        core.training,
        device.type,
        torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type),
        # accelerate replaces this attribute for mixed precision. Users may replace it in every step.
        id(vars(core).get("forward")) if has_class_forward(core) else "replaced",
        *state_of(core),
        # Much wider batches may have longer documents than the check had. A rank must not decide about them alone.
        0 if group else holds_up_to(max(column["input_ids"].shape[1] for column in columns)),
        more,
    )
    found = decisions.setdefault(core, {})
    if situation not in found:
        # The check makes a few calls of odd shapes, which are not worth compiling.
        with torch.compiler.set_stance("force_eager"):
            found[situation] = decide(partial(_on_all_ranks, device=device, group=group) if group else bool)
    return found[situation]


def counts_checkpoints(model: nn.Module) -> bool:
    """Whether DistributedDataParallel with ``static_graph`` counts the calls of layers that are checkpointed."""
    *around, core = layers_of_wrapping(model)
    if not any(getattr(layer, "static_graph", False) for layer in around):
        return False
    try:
        return checkpoints_layers(core)
    except AttributeError:  # no encoder that could be packed
        return False


def _on_all_ranks(here: bool, device: torch.device, group: dist.ProcessGroup) -> bool:
    return bool(least_of_all_ranks(int(here), device, group))


def state_of(core: nn.Module) -> tuple[Hashable, ...]:
    """What users change in a model between batches.

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
