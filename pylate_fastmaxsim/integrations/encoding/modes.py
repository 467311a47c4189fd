"""How a model encodes the texts of its batches: decided on the first one, and logged where it is not the fastest way."""

from __future__ import annotations

import logging
from collections.abc import Sequence
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
from pylate_fastmaxsim.integrations.encoding.mode_cache import Agree, Decisions, decided
from pylate_fastmaxsim.integrations.encoding.plans import EncodingPlan
from pylate_fastmaxsim.integrations.encoding.reasons import (
    carried,
    not_carried,
    reason_in_user_code,
    reason_not_to_join,
    reason_to_leave,
)
from pylate_fastmaxsim.integrations.log import log_once
from pylate_fastmaxsim.integrations.models.wrappers import group_in_step, unwrap

chosen: Decisions[str] = WeakKeyDictionary()

# Whether a packed encoder takes the queries with the documents.
joined: Decisions[bool] = WeakKeyDictionary()

# Whether queries may be divided into calls in any way.
divisible: Decisions[bool] = WeakKeyDictionary()

_PADDED = "Documents are encoded with padding, as stock {} does: %s."

APART = "Queries are not encoded with the documents but in a call of their own: %s."

_DIVIDED_AS_STOCK = "Queries are divided into calls as stock PyLate does: %s."

# Document tokens that keep a GPU busy while the host launches a call for the queries. More of them cost less apart from
# the queries: FlashAttention starts as many blocks for each text of a call as the longest needs, queries included.
MOST_TOKENS_BESIDE_QUERIES = 2**16


def mode_for(
    model: nn.Module,
    columns: Sequence[dict[str, Tensor]],
    group: dist.ProcessGroup | None,
    backwards: bool = False,
    host: str = "PyLate",
) -> str:
    """How to encode with this model of ``host``. ``backwards``: where each call has one of its own."""
    decide = partial(_fastest_mode, model, columns, backwards, _PADDED.format(host))
    # Alone a process can decide anew in any step; all of them would have to find the same.
    own = None if group else reason_in_user_code(model, backwards)
    return decided(chosen, model, columns, decide, group, (_features_that_differ(columns, group), backwards, own))


# Outside of what is compiled, as plan_documents.
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
            f"The queries of this batch cannot be encoded with the documents, as those before were: {reason}. All "
            "processes must encode alike: train with enable(padding_free=False), or without such queries."
        )
    return _works(core, bool, reason, APART)


# Outside of what is compiled, as plan_documents.
@torch.compiler.disable
def can_be_divided(model: nn.Module, queries: dict[str, Tensor]) -> bool:
    """Whether a query gets the same embeddings in every call, whoever else is in it."""
    core, group = unwrap(model), group_in_step(model, backwards=True)
    more = core.do_query_expansion, core.attend_to_expansion_tokens

    def decide(agree: Agree) -> bool:
        return _works(core, agree, why_not_divided(core, carried(queries)), _DIVIDED_AS_STOCK)

    return decided(divisible, model, [queries], decide, group, more)


def mode_with_gaps(group: dist.ProcessGroup | None) -> str:
    """How to encode documents whose attention masks have gaps, with a model that is packed otherwise."""
    if group:
        raise ValueError(
            "A document of this batch has a gap in its attention_mask. It cannot be packed, and all processes must "
            "encode alike: train with enable(padding_free=False), or without gaps."
        )
    return "grouped"


def forget() -> None:
    """Decide anew about every model."""
    for decisions in (chosen, joined, divisible):
        decisions.clear()


def _fastest_mode(
    model: nn.Module, columns: Sequence[dict[str, Tensor]], backwards: bool, padded: str, agree: Agree
) -> str:
    """The first mode that works, on all ranks.

    They agree on each trial before the next: to run a sharded model alone would wait for the others for ever.
    """
    core = unwrap(model)
    works = partial(_works, core, agree)
    if not works(reason_to_leave(model, columns) or reason_in_user_code(model, backwards), padded):
        return "padded"
    samples = short_to_long(core, Documents.from_columns(columns))
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
    """Whether there is no reason on any rank; else a line of log."""
    everywhere = agree(reason_not_to is None)
    if not everywhere:
        reason = reason_not_to or "another process of this run cannot do without"
        log_once(message, reason, level=level, about=core)
    return everywhere


def _features_that_differ(columns: Sequence[dict[str, Tensor]], group: dist.ProcessGroup | None) -> frozenset[str]:
    """Features of a batch that others may not have; no rank may decide about them without the others."""
    return frozenset() if group else not_carried(columns)
