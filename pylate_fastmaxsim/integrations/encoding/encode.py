"""Encode the texts of a batch without padding, where an encoder gives the same embeddings with and without."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pylate_fastmaxsim.integrations.compilation import layers as compilation_layers
from pylate_fastmaxsim.integrations.encoding import attention, graphs, masks, modes, token_counts
from pylate_fastmaxsim.integrations.encoding.attention import packed_mask
from pylate_fastmaxsim.integrations.encoding.batch import Documents
from pylate_fastmaxsim.integrations.encoding.plans import (
    EncodingPlan,
    grouped_plan,
    joint_call,
    mini_batches,
    packed_plan,
    padded_plan,
    rows_of,
)
from pylate_fastmaxsim.integrations.encoding.token_counts import without_total
from pylate_fastmaxsim.integrations.models.wrappers import (
    StandIn,
    calls_of_all_ranks,
    group_in_step,
    least_of_all_ranks,
    unwrap,
)
from pylate_fastmaxsim.integrations.options import current_options
from pylate_fastmaxsim.tokens import TokenBatch

# Makes one call of the model and returns its token embeddings [N, L, d].
Embed = Callable[[nn.Module, dict[str, Tensor]], Tensor]


def encode_batch(
    model: nn.Module, features: Sequence[dict[str, Tensor]], skiplist: list[int], embed: Embed
) -> tuple[Tensor, TokenBatch]:
    """Encode the queries and the documents of a batch, in one call where the documents are packed.

    With small batches a GPU waits for the host, which launches every layer once per call. Queries have a call of their
    own if the first batch has more than 65,536 document tokens, or if they get other embeddings beside documents.

    ``features`` are the tokenized columns: the queries, and then the documents. ``embed`` makes one call of the model.
    Returns token embeddings of the queries, ``[Nq, Lq, d]``, and of the documents, column after column.
    """
    queries, columns = features[0], features[1:]
    plan = plan_documents(model, columns, skiplist)
    if not modes.encodes_jointly(model, queries, columns, plan):
        calls = [without_total(queries), *plan.calls]
        embeddings = embed(model, calls[0]), plan.batch([embed(model, call) for call in plan.calls])
        if plan.as_stock:
            # Outputs that modules add to the features, such as regularisation terms, for a loss built on this one.
            for column, call in zip(features, calls, strict=True):
                column.update((key, value) for key, value in call.items() if key not in column)
        return embeddings
    call = joint_call(unwrap(model), plan.calls[0], queries)
    compilation_layers.mark_varying(model, [call])
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
    groups: bool = True,
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
        packed. Waits for the GPU once, for the lengths. Without ``groups``, for documents that were sorted, padded.
    ``padded``
        As stock PyLate; also while the flag is off.

    GradCache divides into calls of at most ``mini_batch_size`` padded documents' tokens, or of ``mini_batch_tokens``
    tokens, where padded with their padding; a longer document has a call of its own. All ranks of a distributed run make
    equally many calls. Dividing waits for the GPU.

    Raises
    ------
    ValueError
        All ranks must encode alike, and this batch cannot be encoded as the first was; or a rank has fewer documents
        than another one makes calls; or an earlier batch had wrong token counts.
    """
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
    if mode == "padded" or mode == "grouped" and not groups:
        if mini_batch_tokens is not None:
            mini_batch_size = _texts_within(mini_batch_tokens, document_features, group)
        return padded_plan(document_features, skiplist, mini_batch_size)
    budget = mini_batch_tokens if mini_batch_size is None else mini_batch_size * documents.max_length
    agree = int
    if group:
        modes.require_features_without_padding(model, document_features)
        # Without a budget the smallest number wins, so that no rank needs more documents than it has.
        of_all_ranks = least_of_all_ranks if budget is None else partial(calls_of_all_ranks, texts=len(documents))
        agree = partial(of_all_ranks, device=documents.input_ids.device, group=group)
    if mode == "grouped":
        plan = grouped_plan(documents, skiplist, budget, agree)
    else:
        plan = packed_plan(unwrap(model), documents, skiplist, budget, agree)
    compilation_layers.mark_varying(model, plan.calls)
    return plan


def query_row(model: nn.Module, features: dict[str, Tensor]) -> dict[str, Tensor]:
    """The call that encodes padded queries: all of their tokens in one row, where documents and queries share one."""
    plan = plan_documents(model, [features], [], groups=False)
    if not modes.encodes_jointly(model, features, [features], plan):
        return without_total(features)
    nothing = {key: values[:, :0] for key, values in plan.calls[0].items() if key != "attention_mask"}
    borders = features["input_ids"].new_zeros(1, dtype=torch.int32)
    return joint_call(unwrap(model), {**nothing, "attention_mask": packed_mask(borders, 1)}, features)


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
    if plan.as_stock or not modes.queries_can_be_divided(model, features):
        return mini_batches(features, mini_batch_size)
    tokens = max(call["input_ids"].numel() for call in plan.calls)
    calls = -(-count // max(mini_batch_size, tokens // length))
    if group:
        calls = calls_of_all_ranks(calls, features["input_ids"].device, group, texts=count)
    queries = [rows_of(features, slice(count * call // calls, count * (call + 1) // calls)) for call in range(calls)]
    compilation_layers.mark_varying(model, queries)
    return queries


def _texts_within(tokens: int, columns: Sequence[dict[str, Tensor]], group: dist.ProcessGroup | None) -> int:
    """Padded texts that hold at most so many tokens, at least 1; among the ranks of a group the smallest number."""
    ids = max((column["input_ids"] for column in columns), key=lambda ids: ids.shape[1])
    texts = max(1, tokens // max(1, ids.shape[1]))
    return least_of_all_ranks(texts, ids.device, group) if group else texts


def release() -> None:
    """Restore attention functions and compiled layers, and forget what was decided about models."""
    attention.release()
    graphs.release()
    compilation_layers.release()
    token_counts.reset()
    masks.forget()
    modes.forget()
