"""The encoder calls that encode the documents of a batch, with and without padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pylate_fastmaxsim.integrations.encoding.attention import packed_mask
from pylate_fastmaxsim.integrations.encoding.batch import Documents, counting, extents, rows_of
from pylate_fastmaxsim.integrations.encoding.batching import (
    fill_by_length,
    fill_in_order,
    group_by_length,
    number_of_groups,
    split_until,
)
from pylate_fastmaxsim.integrations.encoding.token_counts import without_total
from pylate_fastmaxsim.tokens import TokenBatch

# From the number of calls that this process would make to the number that all processes make.
AgreeOnNumber = Callable[[int], int]


@dataclass(frozen=True)
class EncodingPlan:
    """The encoder calls that together encode the documents of a batch.

    Parameters
    ----------
    calls
        Features to call the model with, one dictionary per call.
    keep
        For each call, which of its token embeddings are scored, flattened, bool.
    starts, lengths
        Where each document lies in the token embeddings of all calls together, ``[N]``, int64.
    max_length
        An upper bound on ``lengths``.
    as_stock
        Whether these are the calls that stock PyLate makes.
    """

    calls: list[dict[str, Tensor]]
    keep: list[Tensor]
    starts: Tensor
    lengths: Tensor
    max_length: int
    as_stock: bool = False

    def batch(self, values: Sequence[Tensor]) -> TokenBatch:
        """The documents, from the token embeddings ``[..., d]`` that each call returned."""
        values = [part.flatten(0, -2) for part in values]
        return TokenBatch(
            values[0] if len(values) == 1 else torch.cat(values),
            self.starts,
            self.lengths,
            self.max_length,
            torch.cat(self.keep),
        )


def packed_plan(
    documents: Documents,
    position_ids: Tensor,
    skipped: Callable[[Tensor], Tensor],
    token_budget: int | None = None,
    agree: AgreeOnNumber = int,
) -> EncodingPlan:
    """Encode the attended tokens of all documents in one row, or in mini-batches of ``token_budget`` tokens.

    Parameters
    ----------
    documents
        What to encode.
    position_ids
        Position of each token in the encoder's own counting, ``[N, L]``.
    skipped
        Whether each token id is not scored, bool.
    token_budget
        Tokens per mini-batch. Dividing waits for the device once.
    agree
        From the number of calls that this process would make to the number that all make: with a budget at least as
        many, without one at most.
    """
    padded = {
        "input_ids": documents.input_ids,
        "position_ids": position_ids,
        "token_type_ids": documents.token_type_ids,
    }
    packed = {
        key: values.reshape(-1)[documents.token_index].unsqueeze(0)
        for key, values in padded.items()
        if values is not None
    }
    cu_seqlens = documents.cu_seqlens
    if token_budget is None:
        bounds = [(0, len(documents), 0, len(documents.token_index))]
    else:
        ends = cu_seqlens.tolist()
        parts = fill_in_order([end - start for start, end in zip(ends, ends[1:], strict=False)], token_budget)
        parts = split_until(parts, agree(len(parts)))
        bounds = [(part[0], part[-1] + 1, ends[part[0]], ends[part[-1] + 1]) for part in parts]
    calls = [
        {
            **{key: values[:, start:end] for key, values in packed.items()},
            "attention_mask": packed_mask(cu_seqlens[first : last + 1] - start, documents.max_length),
        }
        for first, last, start, end in bounds
    ]
    offsets = cu_seqlens.long()
    return EncodingPlan(
        calls,
        [~skipped(call["input_ids"].squeeze(0)) for call in calls],
        offsets[:-1],
        offsets.diff(),
        documents.max_length,
    )


def grouped_plan(
    documents: Documents,
    skipped: Callable[[Tensor], Tensor],
    token_budget: int | None,
    agree: AgreeOnNumber = int,
) -> EncodingPlan:
    """Encode documents of similar length together, each group cut to its longest document.

    Arguments as in :func:`packed_plan`. Waits for the device once, for the lengths.
    """
    device = documents.input_ids.device
    spans = extents(documents.attention_mask)
    lengths = spans.clamp(min=1).tolist()
    if token_budget is None:
        groups = group_by_length(lengths, agree(number_of_groups(lengths, on_gpu=device.type != "cpu")))
    else:
        groups = fill_by_length(lengths, token_budget)
        groups = split_until(groups, agree(len(groups)))
    calls, keep, starts, rows = [], [], [0] * len(documents), 0
    for group in groups:
        longest = max(lengths[document] for document in group)
        for row, document in enumerate(group):
            starts[document] = rows + row * longest
        rows += len(group) * longest
        index = torch.tensor(group, device=device)
        call = {
            "input_ids": documents.input_ids[index, :longest],
            "attention_mask": documents.attention_mask[index, :longest],
        }
        if documents.token_type_ids is not None:
            call["token_type_ids"] = documents.token_type_ids[index, :longest]
        calls.append(call)
        keep.append(counting(call, skipped).reshape(-1))
    return EncodingPlan(calls, keep, torch.tensor(starts, device=device), spans, max(lengths))


def padded_plan(
    columns: Sequence[dict[str, Tensor]],
    skipped: Callable[[Tensor], Tensor],
    mini_batch_size: int | None,
) -> EncodingPlan:
    """Encode the columns as stock PyLate does: as they are, one after the other."""
    columns = [without_total(column) for column in columns]
    calls = [
        rows_of(column, begin, begin + size)
        for column in columns
        for size in [mini_batch_size or max(1, len(column["input_ids"]))]
        for begin in range(0, len(column["input_ids"]), size)
    ]
    keep = [counting(call, skipped).reshape(-1) for call in calls]
    device = columns[0]["input_ids"].device
    starts, rows = [], 0
    for column in columns:
        count, width = column["input_ids"].shape
        starts.append(torch.arange(count, device=device) * width + rows)
        rows += count * width
    lengths = [extents(column["attention_mask"]) for column in columns]
    longest = max(column["input_ids"].shape[1] for column in columns)
    return EncodingPlan(calls, keep, torch.cat(starts), torch.cat(lengths), longest, as_stock=True)


def nothing_skipped(input_ids: Tensor) -> Tensor:
    """``skipped`` for a plan in which every attended token counts."""
    return torch.zeros_like(input_ids, dtype=torch.bool)
