"""Encode documents without padding, on any encoder of transformers, and only where that gives what padding gives."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DataParallel

from pylate_fastmaxsim.integrations.compilation import layers as compilation_layers
from pylate_fastmaxsim.integrations.encoding import attention as encoding_attention
from pylate_fastmaxsim.integrations.encoding import mask_changes, token_counts
from pylate_fastmaxsim.integrations.encoding.attention import is_packed_mask
from pylate_fastmaxsim.integrations.encoding.calls import positioned, token_embeddings
from pylate_fastmaxsim.integrations.encoding.equivalence import (
    short_to_long,
    why_not_divided,
    why_not_grouped,
    why_not_joint,
    why_not_packed,
)
from pylate_fastmaxsim.integrations.encoding.joint import joint_call
from pylate_fastmaxsim.integrations.encoding.mode_cache import (
    Agree,
    Decisions,
    calls_of_all_ranks,
    counts_checkpoints,
    decided,
    least_of_all_ranks,
)
from pylate_fastmaxsim.integrations.encoding.plans import (
    TOKEN_TOTAL,
    Documents,
    EncodingPlan,
    column_has_gaps,
    counting,
    grouped_plan,
    packed_plan,
    padded_plan,
    rows_of,
    without_total,
)
from pylate_fastmaxsim.integrations.log import log_once
from pylate_fastmaxsim.integrations.models.encoders import inputs_of
from pylate_fastmaxsim.integrations.models.user_code import has_class_forward, own_code, reader, unknown_wrapper
from pylate_fastmaxsim.integrations.models.wrappers import group_in_step, is_compiled, layers_of_wrapping, unwrap
from pylate_fastmaxsim.integrations.options import current_options
from pylate_fastmaxsim.tokens import TokenBatch

# What makes token embeddings [N, L, d] of one call of the model.
Embed = Callable[[nn.Module, dict[str, Tensor]], Tensor]

# What the plans without padding carry over; an encoder that is given more than this is left alone.
UNDERSTOOD = {"input_ids", "attention_mask", "token_type_ids"}

# What they leave out without a loss: what the patched collator adds, and what PyLate's tokenizer leaves of texts that
# are dictionaries.
_LEFT_OUT = {TOKEN_TOTAL, "text_keys"}

_modes: Decisions[str] = WeakKeyDictionary()

_PADDED = "Documents are encoded with padding, as stock {} does: %s."
APART = "Queries are not encoded with the documents but in a call of their own: %s."
_DIVIDED_AS_STOCK = "Queries are divided into calls as stock PyLate does: %s."

# Document tokens that keep a GPU busy while the host launches a call for the queries. More of them cost less apart from
# the queries: FlashAttention starts as many blocks for each text of a call as the longest needs, queries included.
MOST_TOKENS_BESIDE_QUERIES = 2**16

# Whether a packed encoder takes the queries with the documents.
_joint: Decisions[bool] = WeakKeyDictionary()

# Whether queries may be divided into calls in any way.
_divisible: Decisions[bool] = WeakKeyDictionary()


def encode(model: nn.Module, plan: EncodingPlan, embed: Embed = token_embeddings) -> TokenBatch:
    """Token embeddings of the documents of a plan, as ``embed`` makes them of one call of the model."""
    return plan.batch([embed(model, call) for call in plan.calls])


def encode_batch(
    model: nn.Module, features: Sequence[dict[str, Tensor]], skiplist: list[int], embed: Embed
) -> tuple[Tensor, TokenBatch]:
    """Encode the queries and the documents of a batch, in one call where the documents are packed.

    Small batches are bound by the host, which launches everything once for each call and layer. Where the first batch
    has more than 65,536 document tokens, or where a packed encoder does not give queries the same embeddings beside
    documents, they have a call of their own, as in stock PyLate.

    Parameters
    ----------
    model
        A ``pylate.models.ColBERT``, possibly wrapped.
    features
        The tokenized columns: the queries, and then the documents as in :func:`plan_documents`.
    skiplist
        Ids of the tokens of documents that are not scored.
    embed
        Makes token embeddings of one call of the model.

    Returns
    -------
    tuple of Tensor and TokenBatch
        Token embeddings of the queries, ``[Nq, Lq, d]``, and of the documents, column after column.
    """
    queries, columns = features[0], features[1:]
    plan = plan_documents(model, columns, skiplist)
    if not _joins(model, queries, columns, plan):
        calls = [without_total(queries), *plan.calls]
        embeddings = embed(model, calls[0]), encode(model, plan, embed)
        if plan.as_stock:
            # What modules leave there, as the terms of a regulariser, for a loss that is built on this one.
            for column, call in zip(features, calls, strict=True):
                column.update((key, value) for key, value in call.items() if key not in column)
        return embeddings
    call = joint_call(unwrap(model), plan.calls[0], queries)
    if is_compiled(model):
        compilation_layers.mark_varying(call)
    rows = embed(model, call).flatten(0, -2)
    documents, rows = rows.tensor_split([plan.calls[0]["input_ids"].shape[1]])
    return rows.view(*queries["input_ids"].shape, -1), plan.batch([documents])


# Where a loss is compiled, this and what it decides stay outside: a trial sets how to compile, which cannot be traced.
@torch.compiler.disable
def plan_documents(
    model: nn.Module,
    document_features: Sequence[dict[str, Tensor]],
    skiplist: list[int],
    mini_batch_size: int | None = None,
) -> EncodingPlan:
    """The encoder calls that encode the documents of all columns of a batch.

    Plan before the queries of the batch are encoded: the encoder is compiled here if that is asked for, and
    gradient checkpointing must find it in backward as it was in forward.

    How is decided on the first batch of an encoder and logged where it is not the fastest way:

    ``packed``
        all attended tokens in one row, attention inside each document. Nothing waits for the device
        if the patched collator made the batch: it leaves with each column which tokens are attended to.
        Without the trainer, where a later change leaves the shape of an ``attention_mask`` as it was, a GPU says so too
        late: a later batch raises. Nothing is left by a collator with a ``__call__`` of its own, and its masks are
        looked at here, which waits for the device.
    ``grouped``
        documents of similar length together, cut to the longest of the group. Where the encoder
        cannot be packed, and on a CPU. On a CUDA device this waits for it once, for the lengths.
    ``padded``
        as stock PyLate does.

    Parameters
    ----------
    model
        A ``pylate.models.ColBERT``, possibly inside DistributedDataParallel or ``torch.compile``.
    document_features
        For each document column, what the tokenizer (and the collator) made of it:
        ``input_ids`` and ``attention_mask``, ``[N, L]``.
    skiplist
        Ids of the tokens that are not scored.
    mini_batch_size
        No call holds more tokens than that many padded documents, and all ranks of a distributed run make equally
        many; to divide waits for the device.

    Returns
    -------
    EncodingPlan
        For :func:`encode`, or for whoever makes the calls one at a time. It gives token embeddings as the model does
        (not normalized), column after column.
    """
    skipped = partial(_skipped, skiplist=tuple(skiplist))
    options = current_options()
    mode = "padded"
    # GradCache has a backward for each call.
    backwards = mini_batch_size is not None
    group = group_in_step(model, backwards)
    if options is None or options.padding_free:
        mode = mode_for(model, document_features, group, backwards)
    if options is not None and options.compile:
        compilation_layers.compile_layers(model)
    if mode == "padded":
        return padded_plan(document_features, skipped, mini_batch_size)
    if group and (reason := _reason_in_features(unwrap(model), document_features)) is not None:
        raise ValueError(
            f"The documents of this batch cannot be encoded without padding, as those before were: {reason}. All "
            "processes must encode alike: train with enable(padding_free=False), or give every batch the same features."
        )
    documents = Documents.from_columns(document_features)
    if mode == "packed" and documents.gaps:
        mode = _mode_with_gaps(group)
    budget = None if mini_batch_size is None else mini_batch_size * documents.max_length
    agree = int
    if group:
        # Without a budget no rank is asked for more calls than it has documents.
        of_all_ranks = least_of_all_ranks if budget is None else partial(calls_of_all_ranks, texts=len(documents))
        agree = partial(of_all_ranks, device=documents.input_ids.device, group=group)
    if mode == "grouped":
        plan = grouped_plan(documents, skipped, budget, agree)
    else:
        plan = packed_plan(*positioned(unwrap(model), documents), skipped, budget, agree)
    if is_compiled(model):
        for call in plan.calls:
            compilation_layers.mark_varying(call)
    return plan


def query_calls(
    model: nn.Module, features: dict[str, Tensor], plan: EncodingPlan, mini_batch_size: int
) -> list[dict[str, Tensor]]:
    """The encoder calls of the queries beside those of the documents, with the queries as they are.

    Queries are short: at ``mini_batch_size`` of them a GPU would wait for the host. So a call takes more where it still
    holds no more tokens than the largest call of the documents. All ranks of a distributed run make equally many.
    Beside documents as stock PyLate encodes them, queries are too: a model may depend on how texts are divided into
    calls. So they are where an encoder makes something else of a query that has a call of its own.
    """
    features = without_total(features)
    count, length = features["input_ids"].shape
    if plan.as_stock or not _can_be_divided(model, features):
        return [rows_of(features, begin, begin + mini_batch_size) for begin in range(0, count, mini_batch_size)]
    tokens = max(call["input_ids"].numel() for call in plan.calls)
    calls = -(-count // max(mini_batch_size, tokens // length))
    if group := group_in_step(model, backwards=True):
        calls = calls_of_all_ranks(calls, count, features["input_ids"].device, group)
    queries = [rows_of(features, count * call // calls, count * (call + 1) // calls) for call in range(calls)]
    if is_compiled(model):
        for call in queries:
            compilation_layers.mark_varying(call)
    return queries


def counting_tokens(features: dict[str, Tensor], skiplist: list[int]) -> Tensor:
    """Which tokens of padded documents are scored, ``[N, L]``, bool: attended to and not in the skiplist."""
    return counting(features, partial(_skipped, skiplist=tuple(skiplist)))


def release() -> None:
    """Put the encoders back that were prepared for packing or compiled, and forget what was decided about them."""
    encoding_attention.release()
    compilation_layers.release()
    token_counts.reset()
    mask_changes.forget()
    for decisions in (_modes, _joint, _divisible):
        decisions.clear()


def _is_skipped(ids: tuple[int, ...], device: torch.device) -> Tensor:
    """Of each token id up to the largest of ``ids``, and of one behind it, whether it is among them."""
    table = torch.zeros(max((-1, *ids)) + 2, dtype=torch.bool, device="cpu")
    table[[each for each in ids if each >= 0]] = True
    return table.to(device)


# Kept on the device: to copy it there in every step would wait for the device.
_kept_table = lru_cache(maxsize=16)(_is_skipped)


def _skipped(input_ids: Tensor, skiplist: tuple[int, ...]) -> Tensor:
    # Not torch.isin, which for some sizes sorts and waits for the device, nor a comparison with each id, which would
    # take as many times the memory. What a dry run with fake tensors makes is not kept.
    is_real = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() == 0
    table = (_kept_table if is_real else _is_skipped)(skiplist, input_ids.device)
    return table[input_ids.clamp(-1, len(table) - 1).long()]


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
    own = None if group else _reason_in_own_code(model, backwards)
    return decided(_modes, model, columns, decide, group, (_features_that_differ(columns, group), backwards, own))


def _features_that_differ(columns: Sequence[dict[str, Tensor]], group: dist.ProcessGroup | None) -> frozenset[str]:
    """Features of a batch that others may not have; no rank may decide about them without the others."""
    return frozenset() if group else _not_carried(columns)


def _mode_with_gaps(group: dist.ProcessGroup | None) -> str:
    """How to encode documents whose attention masks have gaps, with a model that is packed otherwise."""
    if group:
        raise ValueError(
            "A document of this batch has a gap in its attention_mask. It cannot be packed, and all processes must "
            "encode alike: train with enable(padding_free=False), or without gaps."
        )
    return "grouped"


def _fastest_mode(
    model: nn.Module, columns: Sequence[dict[str, Tensor]], backwards: bool, padded: str, agree: Agree
) -> str:
    """The first mode that works, on all ranks.

    They agree on each trial before the next: to run a sharded model alone would wait for the others for ever.
    """
    core = unwrap(model)
    works = partial(_works, core, agree)
    if not works(_reason_to_leave(model, columns) or _reason_in_own_code(model, backwards), padded):
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


def _works(
    core: nn.Module, agree: Agree, reason_not_to: str | None, message: str, level: int = logging.WARNING
) -> bool:
    """Whether there is no reason on any rank; else a line of log."""
    everywhere = agree(reason_not_to is None)
    if not everywhere:
        reason = reason_not_to or "another process of this run cannot do without"
        log_once(message, reason, level=level, about=core)
    return everywhere


# Outside of what is compiled, as plan_documents.
@torch.compiler.disable
def _joins(
    model: nn.Module, queries: dict[str, Tensor], columns: Sequence[dict[str, Tensor]], plan: EncodingPlan
) -> bool:
    """Whether the queries go into the call of the documents."""
    if not is_packed_mask(plan.calls[0]["attention_mask"]):
        return False
    core, group = unwrap(model), group_in_step(model)
    tokens = plan.calls[0]["input_ids"].shape[1]
    decide = partial(_should_join, model, queries, columns, tokens)
    more = _features_that_differ(columns, group), core.query_length
    if not decided(_joint, model, columns, decide, group, more):
        return False
    reason = _reason_not_to_join(core, queries)
    if reason is not None and group:
        raise ValueError(
            f"The queries of this batch cannot be encoded with the documents, as those before were: {reason}. All "
            "processes must encode alike: train with enable(padding_free=False), or without such queries."
        )
    return _works(core, bool, reason, APART)


def _should_join(
    model: nn.Module, queries: dict[str, Tensor], columns: Sequence[dict[str, Tensor]], tokens: int, agree: Agree
) -> bool:
    core = unwrap(model)
    if not agree(tokens <= MOST_TOKENS_BESIDE_QUERIES):
        return False
    if not _works(core, agree, _reason_not_to_join(core, queries), APART):
        return False
    samples = short_to_long(core, Documents.from_columns(columns))
    return _works(core, agree, why_not_joint(core, samples, _carried(queries)), APART)


# Outside of what is compiled, as plan_documents.
@torch.compiler.disable
def _can_be_divided(model: nn.Module, queries: dict[str, Tensor]) -> bool:
    """Whether a query gets the same embeddings in every call, whoever else is in it."""
    core, group = unwrap(model), group_in_step(model, backwards=True)
    more = core.do_query_expansion, core.attend_to_expansion_tokens

    def decide(agree: Agree) -> bool:
        return _works(core, agree, why_not_divided(core, _carried(queries)), _DIVIDED_AS_STOCK)

    return decided(_divisible, model, [queries], decide, group, more)


def _reason_not_to_join(core: nn.Module, queries: dict[str, Tensor]) -> str | None:
    length = queries["input_ids"].shape[1]
    if length > core.query_length:
        return f"they have {length} tokens, more than the model's query_length of {core.query_length}"
    if column_has_gaps(queries):
        return "one has a gap in its attention_mask"
    return _reason_in_features(core, [queries])


def _reason_in_features(core: nn.Module, columns: Sequence[dict[str, Tensor]]) -> str | None:
    """Why texts need what the plans without padding do not carry over."""
    more = _not_carried(columns)
    unknown = more & inputs_of(core)
    if unknown:
        return f"the encoder is given {', '.join(sorted(unknown))}"
    if more and (module := reader(core)) is not None:
        return f"{type(module).__name__} may read {', '.join(sorted(more))}"
    return None


def _carried(features: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: features[key] for key in UNDERSTOOD.intersection(features)}


def _not_carried(columns: Sequence[dict[str, Tensor]]) -> frozenset[str]:
    return frozenset().union(*columns) - UNDERSTOOD - _LEFT_OUT


def _reason_to_leave(model: nn.Module, columns: Sequence[dict[str, Tensor]]) -> str | None:
    *around, core = layers_of_wrapping(model)
    if any(isinstance(layer, DataParallel) for layer in around):
        return "DataParallel splits a batch by rows; start the script with accelerate launch or torchrun"
    # A trial calls the model as it is inside, and cannot know what these make of padding, or of more calls.
    if (wrapper := unknown_wrapper(model)) is not None:
        return f"{type(wrapper).__name__} is around the model"
    if not has_class_forward(core):
        return f"the forward of {type(core).__name__} was replaced"
    try:
        reason = _reason_in_features(core, columns)
    except AttributeError:
        return f"{type(core).__name__} does not begin with a Transformer of Sentence Transformers"
    if reason is not None:
        return reason
    if counts_checkpoints(model):
        return "DistributedDataParallel with static_graph counts the calls of checkpointed layers"
    if getattr(core.tokenizer, "padding_side", "right") != "right":
        return "the tokenizer pads on the left"
    return _reason_in_training(core)


def _reason_in_own_code(model: nn.Module, backwards: bool) -> str | None:
    options = current_options()
    if options is not None and options.padding_free == "always":
        return None
    own = own_code(model, backwards)
    return own and f'{own}, and may not treat each text by itself (if it does, switch on with padding_free="always")'


def _reason_in_training(core: nn.Module) -> str | None:
    """What depends, in training, on how texts are divided into calls."""
    for module in core.modules():
        if isinstance(module, _BatchNorm) and module.training:
            return f"{type(module).__name__} normalises by all tokens of a call"
        if module.training and getattr(module, "neftune_noise_alpha", None):
            return "NEFTune scales its noise by the width of a call"
    return None
