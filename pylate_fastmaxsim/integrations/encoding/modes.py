"""Choose how a model encodes its texts, on its first batch: packed, grouped or padded, queries joined or apart."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pylate_fastmaxsim.integrations.encoding.attention import is_packed_mask
from pylate_fastmaxsim.integrations.encoding.batch import Documents
from pylate_fastmaxsim.integrations.encoding.equivalence import (
    short_to_long,
    why_not_divided,
    why_not_grouped,
    why_not_joint,
    why_not_packed,
)
from pylate_fastmaxsim.integrations.encoding.mode_cache import Agree, Decisions, decided, state_of
from pylate_fastmaxsim.integrations.encoding.plans import EncodingPlan
from pylate_fastmaxsim.integrations.encoding.reasons import (
    GAP,
    carried,
    not_carried,
    reason_in_user_code,
    reason_not_to_join,
    reason_to_leave,
)
from pylate_fastmaxsim.integrations.log import log_once
from pylate_fastmaxsim.integrations.models.wrappers import group_in_step, unwrap

# "packed", "grouped" or "padded".
chosen: Decisions[str] = WeakKeyDictionary()

# Whether queries are encoded in the call of packed documents.
joined: Decisions[bool] = WeakKeyDictionary()

# Whether queries may be divided into calls otherwise than in stock PyLate.
divisible: Decisions[bool] = WeakKeyDictionary()

_PADDED = "Documents are encoded with padding, as stock {} does: %s."

APART = "Queries are not encoded with the documents but in a call of their own: %s."

_DIVIDED_AS_STOCK = "Queries are divided into calls as stock PyLate does: %s."

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
