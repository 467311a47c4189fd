"""Encode the texts of a batch without padding, where an encoder gives the same embeddings with and without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pylate_fastmaxsim.integrations.compilation import layers as compilation_layers
from pylate_fastmaxsim.integrations.encoding import attention, graphs, masks, modes, token_counts
from pylate_fastmaxsim.integrations.encoding.batch import Documents, counting, positioned, rows_of, token_embeddings
from pylate_fastmaxsim.integrations.encoding.joint import joint_call
from pylate_fastmaxsim.integrations.encoding.modes import reason_in_features
from pylate_fastmaxsim.integrations.encoding.plans import EncodingPlan, grouped_plan, packed_plan, padded_plan
from pylate_fastmaxsim.integrations.encoding.token_counts import without_total
from pylate_fastmaxsim.integrations.models.wrappers import (
    StandIn,
    calls_of_all_ranks,
    group_in_step,
    is_compiled,
    least_of_all_ranks,
    unwrap,
)
from pylate_fastmaxsim.integrations.options import current_options
from pylate_fastmaxsim.tokens import TokenBatch

# Makes one call of the model and returns its token embeddings [N, L, d].
Embed = Callable[[nn.Module, dict[str, Tensor]], Tensor]


def encode(model: nn.Module, plan: EncodingPlan, embed: Embed = token_embeddings) -> TokenBatch:
    """Token embeddings of the documents of a plan. ``embed`` makes each of its calls."""
    return plan.batch([embed(model, call) for call in plan.calls])


def encode_batch(
    model: nn.Module, features: Sequence[dict[str, Tensor]], skiplist: list[int], embed: Embed
) -> tuple[Tensor, TokenBatch]:
    """Encode the queries and the documents of a batch, in one call where the documents are packed.

    With small batches a GPU waits for the host, which launches every layer once per call. Queries have a call of their
    own if the first batch has more than 65,536 document tokens, or if they get other embeddings beside documents.

    Parameters
    ----------
    model
        A ``pylate.models.ColBERT``, possibly wrapped.
    features
        The tokenized columns: the queries, and then the documents as in :func:`plan_documents`.
    skiplist
        Ids of document tokens that are not scored.
    embed
        Makes one call of the model.

    Returns
    -------
    tuple of Tensor and TokenBatch
        Token embeddings of the queries, ``[Nq, Lq, d]``, and of the documents, column after column.
    """
    queries, columns = features[0], features[1:]
    plan = plan_documents(model, columns, skiplist)
    if not modes.joins(model, queries, columns, plan):
        calls = [without_total(queries), *plan.calls]
        embeddings = embed(model, calls[0]), encode(model, plan, embed)
        if plan.as_stock:
            # Outputs that modules add to the features, such as regularisation terms, for a loss built on this one.
            for column, call in zip(features, calls, strict=True):
                column.update((key, value) for key, value in call.items() if key not in column)
        return embeddings
    call = joint_call(unwrap(model), plan.calls[0], queries)
    if is_compiled(model):
        compilation_layers.mark_varying(call)
    rows = embed(model, call).flatten(0, -2)
    documents, rows = rows.tensor_split([plan.calls[0]["input_ids"].shape[1]])
    return rows.view(*queries["input_ids"].shape, -1), plan.batch([documents])


# Never traced as a part of a compiled loss: the check on the first batch runs the model with compilation off.
@torch.compiler.disable
def plan_documents(
    model: nn.Module,
    document_features: Sequence[dict[str, Tensor]],
    skiplist: list[int],
    mini_batch_size: int | None = None,
    mini_batch_tokens: int | None = None,
) -> EncodingPlan:
    """Plan the encoder calls for the documents of all columns of a batch.

    Call it before the queries are encoded: it compiles the encoder if that is asked for, and gradient checkpointing
    needs the same encoder in forward and backward.

    The mode is chosen on the first batch of a model, and logged if it is not the fastest:

    ``packed``
        All attended tokens stand in one row; attention stays inside each document. Waits for the GPU only if a column
        has no token counts, as from a collator with a ``__call__`` of its own.
    ``grouped``
        Documents of similar length are padded to the longest of their group: on a CPU, and for encoders that cannot be
        packed. Waits for the GPU once, for the lengths.
    ``padded``
        As stock PyLate; also while the flag is off.

    Parameters
    ----------
    model
        A ``pylate.models.ColBERT``, possibly inside DistributedDataParallel or ``torch.compile``.
    document_features
        The tokenized document columns: ``input_ids`` and ``attention_mask``, ``[N, L]``.
    skiplist
        Ids of tokens that are not scored.
    mini_batch_size
        At most so many padded documents' tokens in a call. All ranks of a distributed run make equally many calls.
        Dividing waits for the GPU.
    mini_batch_tokens
        In its place: at most so many tokens in a call, where padded with their padding. A longer document has a call of
        its own.

    Returns
    -------
    EncodingPlan
        For :func:`encode`. Documents come column after column. Token embeddings are the model's, not normalized.

    Raises
    ------
    ValueError
        All ranks must encode alike, and this batch cannot be encoded as the first was; or a rank has fewer documents
        than another one makes calls; or an earlier batch had wrong token counts.
    """
    skipped = partial(_skipped, skiplist=tuple(skiplist))
    # A stand-in answers for the columns as stock gives them to a model.
    options = None if isinstance(model, StandIn) else current_options()
    mode = "padded"
    # GradCache has a backward for each call.
    backwards = mini_batch_size is not None or mini_batch_tokens is not None
    group = group_in_step(model, backwards)
    if options is not None and options.padding_free:
        mode = modes.mode_for(model, document_features, group, backwards)
    if options is not None and options.compile:
        compilation_layers.compile_layers(model)
        graphs.install(model)
    if mode != "padded" and (documents := Documents.from_columns(document_features)).gaps:
        mode = modes.mode_with_gaps(model, mode, group)
    if mode == "padded":
        if mini_batch_tokens is not None:
            mini_batch_size = _texts_within(mini_batch_tokens, document_features, group)
        return padded_plan(document_features, skipped, mini_batch_size)
    if group and (reason := reason_in_features(unwrap(model), document_features)) is not None:
        raise ValueError(
            f"The documents of this batch need padding, and those of earlier batches did not: {reason}. All processes "
            "must encode alike. Give every batch the same features, or train with enable(padding_free=False)."
        )
    budget = mini_batch_tokens if mini_batch_size is None else mini_batch_size * documents.max_length
    agree = int
    if group:
        # Without a budget the smallest number wins, so that no rank needs more documents than it has.
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
    model: nn.Module,
    features: dict[str, Tensor],
    plan: EncodingPlan,
    mini_batch_size: int | None = None,
    mini_batch_tokens: int | None = None,
) -> list[dict[str, Tensor]]:
    """Plan the encoder calls for padded queries, beside a plan for the documents.

    Queries are short: with ``mini_batch_size`` of them a call would leave a GPU idle. A call takes as many as fit the
    tokens of the largest document call. All ranks of a distributed run make equally many calls. Queries are divided as
    in stock PyLate if the documents are, or if a query alone gets other embeddings than beside others.
    ``mini_batch_tokens`` as in :func:`plan_documents`.
    """
    features = without_total(features)
    count, length = features["input_ids"].shape
    group = group_in_step(model, backwards=True)
    if mini_batch_size is None:
        mini_batch_size = _texts_within(mini_batch_tokens, [features], group)
    if plan.as_stock or not modes.can_be_divided(model, features):
        return [rows_of(features, begin, begin + mini_batch_size) for begin in range(0, count, mini_batch_size)]
    tokens = max(call["input_ids"].numel() for call in plan.calls)
    calls = -(-count // max(mini_batch_size, tokens // length))
    if group:
        calls = calls_of_all_ranks(calls, count, features["input_ids"].device, group)
    queries = [rows_of(features, count * call // calls, count * (call + 1) // calls) for call in range(calls)]
    if is_compiled(model):
        for call in queries:
            compilation_layers.mark_varying(call)
    return queries


def _texts_within(tokens: int, columns: Sequence[dict[str, Tensor]], group: dist.ProcessGroup | None) -> int:
    """How many padded texts hold at most so many tokens, at least 1; among the ranks of a group the smallest number."""
    ids = max((column["input_ids"] for column in columns), key=lambda ids: ids.shape[1])
    texts = max(1, tokens // max(1, ids.shape[1]))
    return least_of_all_ranks(texts, ids.device, group) if group else texts


def counting_tokens(features: dict[str, Tensor], skiplist: list[int]) -> Tensor:
    """Which tokens of padded documents are scored, ``[N, L]``, bool: attended to and not in the skiplist."""
    return counting(features, partial(_skipped, skiplist=tuple(skiplist)))


def release() -> None:
    """Restore attention functions and compiled layers, and forget what was decided about models."""
    attention.release()
    graphs.release()
    compilation_layers.release()
    token_counts.reset()
    masks.forget()
    modes.forget()


@lru_cache(maxsize=16)
def _skip_table(ids: tuple[int, ...], device: torch.device) -> Tensor:
    """Whether each token id is in ``ids``, up to one beyond the largest of them."""
    # Kept on the device: copying it there in every step would wait for the device.
    table = torch.zeros(max((-1, *ids)) + 2, dtype=torch.bool, device="cpu")
    table[list(ids)] = True
    return table.to(device)


def _skipped(input_ids: Tensor, skiplist: tuple[int, ...]) -> Tensor:
    # torch.isin waits for the device for some sizes; comparing with each id takes memory for each.
    table = _skip_table(skiplist, input_ids.device)
    return table[input_ids.clamp(max=len(table) - 1).long()]
