"""The encoder calls that encode the documents of a batch, with and without padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pylate_fastmaxsim.integrations.encoding.attention import packed_mask
from pylate_fastmaxsim.integrations.encoding.batch import Documents, counting, extents, rows_of
from pylate_fastmaxsim.integrations.encoding.token_counts import without_total
from pylate_fastmaxsim.tokens import TokenBatch

# From the number of calls that this process would make to the number that all processes make.
AgreeOnNumber = Callable[[int], int]


# Tokens that a GPU encodes while the host launches a call and its backward. Measured for 12 layers of 768 in bf16 on an
# H100: 40 ms to launch, 5 us a token.
TOKENS_PER_CALL = 2**13


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


def number_of_groups(lengths: Sequence[int], on_gpu: bool) -> int:
    """Into how many groups to divide documents of these lengths.

    More groups leave less padding, and each is one more call. On a CPU a call costs little. On a GPU the best number
    minimizes the larger of two times: launching the calls, and encoding their tokens.

    Examples
    --------
    >>> [number_of_groups([9] * n, on_gpu=False) for n in (1, 8, 32, 64, 1024)]
    [1, 2, 6, 8, 8]
    >>> [number_of_groups([100] * (n // 2) + [300] * (n // 2), on_gpu=True) for n in (8, 64, 1024)]
    [1, 2, 2]
    """
    most = min(len(lengths), 8, max(2, len(lengths) // 5))
    if not on_gpu:
        return most
    _, _, size = _sizes(lengths)
    number, shortest = 1, float("inf")
    best = size[:, 0]
    for count in range(1, min(most, len(size) - 1) + 1):
        launched, encoded = count * TOKENS_PER_CALL, best[-1]
        if max(launched, encoded) < shortest:
            number, shortest = count, max(launched, encoded)
        if launched >= encoded:
            break
        best = (best[:-1] + size).min(axis=1)
    return number


def group_by_length(lengths: Sequence[int], groups: int) -> list[list[int]]:
    """Divide documents into exactly ``groups`` groups of similar length, with the least padding.

    Groups are intervals of the sorted lengths. Dynamic programming over the distinct lengths finds the best boundaries.

    Parameters
    ----------
    lengths
        Length of each document.
    groups
        From 1 to ``len(lengths)``.

    Returns
    -------
    list of list of int
        Indices of the documents of each group, none empty, by ascending length.

    Examples
    --------
    >>> group_by_length([9, 2, 30, 3, 8], groups=3)
    [[1, 3], [4, 0], [2]]
    """
    order, ends, size = _sizes(lengths)
    best, previous = size[:, 0], []
    for _ in range(min(groups, len(size) - 1) - 1):
        total = best[:-1] + size
        previous.append(total.argmin(axis=1))
        best = total.min(axis=1)
    boundaries = [len(size) - 1]
    for choice in reversed(previous):
        boundaries.append(int(choice[boundaries[-1]]))
    parts = np.split(order, ends[boundaries[:0:-1]])
    return split_until([part.tolist() for part in parts], groups)


def _sizes(lengths: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Documents sorted by length, the number of documents up to each distinct length, and the sizes of groups.

    ``size[j, i]`` are the tokens, with padding, of a group of the distinct lengths ``i`` to ``j - 1``. If the best
    division of the first ``j`` lengths has ``best[j]`` tokens, the best with one group more has the minimum over ``i``
    of ``best[i] + size[j, i]``.
    """
    order = np.argsort(np.asarray(lengths), kind="stable")
    distinct, counts = np.unique(np.asarray(lengths)[order], return_counts=True)
    ends = np.concatenate([[0], np.cumsum(counts)])
    size = (ends[1:, None] - ends[None, :-1]) * distinct[:, None].astype(np.float64)
    size = np.concatenate([np.full((1, len(distinct)), np.inf), np.where(size > 0, size, np.inf)])
    return order, ends, size


def fill_in_order(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Divide documents, in their order, into mini-batches of at most ``budget`` tokens.

    A document longer than the budget is a mini-batch of its own.

    Examples
    --------
    >>> fill_in_order([5, 4, 3, 9, 1], budget=10)
    [[0, 1], [2], [3, 4]]
    """
    parts: list[list[int]] = []
    filled = budget
    for index, length in enumerate(lengths):
        if not parts or filled + length > budget:
            parts.append([])
            filled = 0
        parts[-1].append(index)
        filled += length
    return parts


def fill_by_length(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Divide documents of similar length into mini-batches of at most ``budget`` tokens, padding included.

    A document longer than the budget is a mini-batch of its own.

    Examples
    --------
    >>> fill_by_length([5, 4, 3, 9, 1], budget=10)
    [[3], [0, 1], [2, 4]]
    """
    parts: list[list[int]] = []
    longest = 0
    for index in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        if not parts or (len(parts[-1]) + 1) * longest > budget:
            parts.append([])
            longest = lengths[index]
        parts[-1].append(index)
    return parts


def split_until(parts: list[list[int]], count: int) -> list[list[int]]:
    """Halve the part with the most documents until there are ``count`` parts.

    Raises
    ------
    ValueError
        There are fewer documents than ``count``.

    Examples
    --------
    >>> split_until([[0, 1, 2], [3]], count=3)
    [[0], [1, 2], [3]]
    """
    parts = list(parts)
    while len(parts) < count:
        largest = max(range(len(parts)), key=lambda part: len(parts[part]))
        part = parts[largest]
        if len(part) < 2:
            raise ValueError(f"split_until: cannot divide {sum(map(len, parts))} documents into {count} parts.")
        parts[largest : largest + 1] = [part[: len(part) // 2], part[len(part) // 2 :]]
    return parts
