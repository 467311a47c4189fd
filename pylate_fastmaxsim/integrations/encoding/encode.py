"""Encode the texts of a batch without padding, on any encoder of transformers, where that gives what padding gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor, nn

from pylate_fastmaxsim.integrations.compilation import layers as compilation_layers
from pylate_fastmaxsim.integrations.encoding import attention, mask_changes, modes, token_counts
from pylate_fastmaxsim.integrations.encoding.batch import Documents, counting, rows_of
from pylate_fastmaxsim.integrations.encoding.calls import positioned, token_embeddings
from pylate_fastmaxsim.integrations.encoding.joint import joint_call
from pylate_fastmaxsim.integrations.encoding.mode_cache import calls_of_all_ranks, least_of_all_ranks
from pylate_fastmaxsim.integrations.encoding.plans import EncodingPlan, grouped_plan, packed_plan, padded_plan
from pylate_fastmaxsim.integrations.encoding.reasons import reason_in_features
from pylate_fastmaxsim.integrations.encoding.token_counts import without_total
from pylate_fastmaxsim.integrations.models.wrappers import group_in_step, is_compiled, unwrap
from pylate_fastmaxsim.integrations.options import current_options
from pylate_fastmaxsim.tokens import TokenBatch

# What makes token embeddings [N, L, d] of one call of the model.
Embed = Callable[[nn.Module, dict[str, Tensor]], Tensor]


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
    if not modes.joins(model, queries, columns, plan):
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
        mode = modes.mode_for(model, document_features, group, backwards)
    if options is not None and options.compile:
        compilation_layers.compile_layers(model)
    if mode == "padded":
        return padded_plan(document_features, skipped, mini_batch_size)
    if group and (reason := reason_in_features(unwrap(model), document_features)) is not None:
        raise ValueError(
            f"The documents of this batch cannot be encoded without padding, as those before were: {reason}. All "
            "processes must encode alike: train with enable(padding_free=False), or give every batch the same features."
        )
    documents = Documents.from_columns(document_features)
    if mode == "packed" and documents.gaps:
        mode = modes.mode_with_gaps(group)
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
    if plan.as_stock or not modes.can_be_divided(model, features):
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
    attention.release()
    compilation_layers.release()
    token_counts.reset()
    mask_changes.forget()
    modes.forget()


@lru_cache(maxsize=16)
def _skip_table(ids: tuple[int, ...], device: torch.device) -> Tensor:
    """Of each token id up to the largest of ``ids``, and of one beyond it, whether it is among them."""
    # Kept on the device: to copy it there in every step would wait for the device.
    table = torch.zeros(max((-1, *ids)) + 2, dtype=torch.bool, device="cpu")
    table[list(ids)] = True
    return table.to(device)


def _skipped(input_ids: Tensor, skiplist: tuple[int, ...]) -> Tensor:
    # Not torch.isin, which for some sizes sorts and waits for the device, nor a comparison with each id, which would
    # take as many times the memory.
    table = _skip_table(skiplist, input_ids.device)
    return table[input_ids.clamp(max=len(table) - 1).long()]
