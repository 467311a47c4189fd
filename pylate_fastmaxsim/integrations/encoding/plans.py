"""The encoder calls that encode the documents of a batch: packed in a row, grouped by length, or padded.

Groups and mini-batches are chosen on the host, from lists of lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pylate_fastmaxsim.integrations.encoding.attention import packed_mask
from pylate_fastmaxsim.integrations.encoding.batch import Documents, attended_tokens
from pylate_fastmaxsim.integrations.encoding.masks import masks_unread
from pylate_fastmaxsim.integrations.encoding.token_counts import without_total
from pylate_fastmaxsim.integrations.models.encoders import positions, takes_token_types
from pylate_fastmaxsim.tokens import TokenBatch

# From the number of calls that this process would make to the number that all processes make.
AgreeOnNumber = Callable[[int], int]

# Tokens that a GPU encodes while the host launches a call and its backward. Measured for 12 layers of 768 in bf16 on an
# H100: 40 ms to launch, 5 us a token.
TOKENS_PER_CALL = 2**13


@dataclass(frozen=True)
class EncodingPlan:
    """The encoder calls that together encode the documents of a batch."""

    calls: list[dict[str, Tensor]]
    # For each call, which of its token embeddings are scored, flattened, bool.
    keep: list[Tensor]
    # Where each document lies in the token embeddings of all calls together, [N], int64, and a bound on the lengths.
    starts: Tensor
    lengths: Tensor
    max_length: int
    # Whether these are the calls that stock PyLate makes.
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
    core: nn.Module,
    documents: Documents,
    skiplist: Sequence[int] = (),
    token_budget: int | None = None,
    agree: AgreeOnNumber = int,
) -> EncodingPlan:
    """Encode the attended tokens of all documents in one row, or in mini-batches of ``token_budget`` tokens.

    The model says how it counts positions and whether it takes token types: what an encoder would make up from the shape
    of its input would be wrong for packed documents. Tokens of the skiplist are not scored. Dividing waits for the device
    once. ``agree`` goes from the number of calls that this process would make to the number that all make: with a budget
    at least as many, without one at most.
    """
    types = documents.token_type_ids
    if types is None and takes_token_types(core):
        types = torch.zeros_like(documents.input_ids)
    padded = {
        "input_ids": documents.input_ids,
        "position_ids": positions(core, documents.input_ids),
        "token_type_ids": types,
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
        parts = fill_in_order(np.diff(ends).tolist(), token_budget)
        parts = split_until(parts, agree(len(parts)))
        bounds = [(part[0], part[-1] + 1, ends[part[0]], ends[part[-1] + 1]) for part in parts]
    calls = [
        {
            **{key: values[:, start:end] for key, values in packed.items()},
            "attention_mask": packed_mask(cu_seqlens[first : last + 1] - start, documents.max_length),
        }
        for first, last, start, end in bounds
    ]
    keep = [~skipped(call["input_ids"].squeeze(0), skiplist) for call in calls]
    offsets = cu_seqlens.long()
    return EncodingPlan(calls, keep, offsets[:-1], offsets.diff(), documents.max_length)


# Never traced: as a part of a compiled loss it would be compiled again as batches vary.
@torch.compiler.disable
def joint_call(core: nn.Module, documents: dict[str, Tensor], queries: dict[str, Tensor]) -> dict[str, Tensor]:
    """The call that encodes queries behind packed documents, in the same row.

    All tokens of a query are encoded, and only those in its mask are attended to, as in the padded batch: query
    expansion scores masked tokens. These must come last. Waits for the device if the queries have no token counts.

    The documents are the call of :func:`packed_plan`; the model's ``query_length`` bounds the length of queries.
    """
    ids = queries["input_ids"]
    count, length = ids.shape
    attended, ends, _ = attended_tokens([queries], queries["attention_mask"])
    appended = {
        "input_ids": ids,
        "position_ids": positions(core, ids),
        "token_type_ids": queries.get("token_type_ids", torch.zeros_like(ids)),
    }
    call = {
        key: torch.cat([values, appended[key].reshape(1, -1)], dim=1)
        for key, values in documents.items()
        if key != "attention_mask"
    }
    cu_seqlens, max_length = documents["attention_mask"][0, 0, -1], documents["attention_mask"].shape[2]
    max_length = max(max_length, length)
    rows = torch.arange(1, count + 1, device=ends.device, dtype=ends.dtype) * length + documents["input_ids"].shape[1]
    if len(attended) == count * length:
        call["attention_mask"] = packed_mask(torch.cat([cu_seqlens, rows]), max_length)
    else:
        # The masked rows of a query are the keys of an empty text behind it.
        keys = torch.stack([rows - length + ends.diff(), rows], dim=1).reshape(-1)
        call["attention_mask"] = packed_mask(
            torch.cat([cu_seqlens, rows.repeat_interleave(2)]),
            max_length,
            torch.cat([cu_seqlens, keys]),
            core.query_length,
        )
    return call


def grouped_plan(
    documents: Documents,
    skiplist: Sequence[int] = (),
    token_budget: int | None = None,
    agree: AgreeOnNumber = int,
) -> EncodingPlan:
    """Encode documents of similar length together, each group cut to its longest document.

    Arguments as in :func:`packed_plan`. Waits for the device once, for the lengths.
    """
    device = documents.input_ids.device
    spans = _extents(documents.attention_mask)
    lengths = spans.clamp(min=1).tolist()
    if token_budget is None:
        groups = group_by_length(lengths, agree(number_of_groups(lengths, on_gpu=device.type != "cpu")))
    else:
        groups = fill_by_length(lengths, token_budget)
        groups = split_until(groups, agree(len(groups)))
    calls, starts, rows = [], [0] * len(documents), 0
    for group in groups:
        longest = max(lengths[document] for document in group)
        for row, document in enumerate(group):
            starts[document] = rows + row * longest
        rows += len(group) * longest
        index = torch.tensor(group, device=device)
        calls.append({key: values[index, :longest] for key, values in documents.column.items()})
    keep = [live_tokens(call, skiplist).reshape(-1) for call in calls]
    return EncodingPlan(calls, keep, torch.tensor(starts, device=device), spans, max(lengths))


def padded_plan(
    columns: Sequence[dict[str, Tensor]], skiplist: Sequence[int], mini_batch_size: int | None
) -> EncodingPlan:
    """Encode the columns as stock PyLate does: as they are, one after the other."""
    calls = [call for column in columns for call in mini_batches(without_total(column), mini_batch_size)]
    keep = [live_tokens(call, skiplist).reshape(-1) for call in calls]
    starts, rows = [], 0
    for column in columns:
        count, width = column["input_ids"].shape
        starts.append(torch.arange(count, device=column["input_ids"].device) * width + rows)
        rows += count * width
    lengths = [_extents(column["attention_mask"]) for column in columns]
    longest = max(column["input_ids"].shape[1] for column in columns)
    return EncodingPlan(calls, keep, torch.cat(starts), torch.cat(lengths), longest, as_stock=True)


def mini_batches(features: dict[str, Tensor], size: int | None) -> list[dict[str, Tensor]]:
    """Divide the texts of a column into mini-batches of ``size``, or leave them in one."""
    count = len(features["input_ids"])
    size = size or max(1, count)
    return [rows_of(features, slice(begin, begin + size)) for begin in range(0, count, size)]


def rows_of(features: dict[str, object], rows: slice | Tensor) -> dict[str, object]:
    """Take some texts of a column. Features that are not one value per text, such as a scalar, are kept whole."""
    count = len(features["input_ids"])

    def of(value: object) -> object:
        if isinstance(value, Tensor):
            return value[rows] if value.shape[:1] == (count,) else value
        if not isinstance(value, list) or len(value) != count:
            return value
        return value[rows] if isinstance(rows, slice) else [value[row] for row in rows.tolist()]

    return {key: of(value) for key, value in features.items()}


def token_embeddings(model: nn.Module, features: dict[str, Tensor]) -> Tensor:
    """Token embeddings ``[N, L, d]`` of one call of the model. ``features`` is not changed."""
    with masks_unread():
        return model(dict(features))["token_embeddings"]


def unit(embeddings: Tensor) -> Tensor:
    """Token embeddings ``[..., d]`` divided by their length, in the dtype that they are scored in.

    Under autocast the quotient is float32, which stock's scoring rounds to the autocast dtype as well.

    Examples
    --------
    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     unit(torch.tensor([[3.0, 4.0]]))
    tensor([[0.6016, 0.8008]], dtype=torch.bfloat16)
    """
    device = embeddings.device.type
    if not torch.is_autocast_enabled(device) or embeddings.dtype == torch.float64:
        return F.normalize(embeddings, dim=-1)
    return F.normalize(embeddings.float(), dim=-1).to(torch.get_autocast_dtype(device))


def live_tokens(column: dict[str, Tensor], skiplist: Sequence[int]) -> Tensor:
    """Tokens of padded texts that are attended to and not in the skiplist, ``[N, L]``, bool."""
    return column["attention_mask"].bool() & ~skipped(column["input_ids"], skiplist)


def skipped(input_ids: Tensor, skiplist: Sequence[int]) -> Tensor:
    """Tokens of the skiplist, bool."""
    if not skiplist:
        return torch.zeros_like(input_ids, dtype=torch.bool)
    # torch.isin waits for the device for some sizes; comparing with each id takes memory for each.
    table = _skip_table(tuple(skiplist), input_ids.device)
    return table[input_ids.clamp(max=len(table) - 1).long()]


# Kept on the device: copying it there in every step would wait for the device.
@lru_cache(maxsize=16)
def _skip_table(ids: tuple[int, ...], device: torch.device) -> Tensor:
    """The ids as a bool tensor, up to one beyond the largest of them."""
    table = torch.zeros(max(ids) + 2, dtype=torch.bool, device="cpu")
    table[list(ids)] = True
    return table.to(device)


def _extents(attention_mask: Tensor) -> Tensor:
    """Columns up to and with the last attended one, ``[N]``, int64."""
    columns = torch.arange(1, attention_mask.shape[1] + 1, device=attention_mask.device)
    return (attention_mask.bool() * columns).amax(dim=1)


def number_of_groups(lengths: Sequence[int], on_gpu: bool) -> int:
    """Choose into how many groups to divide documents of these lengths.

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
    """Divide documents into exactly ``groups`` groups of similar length, by ascending length, with the least padding.

    Groups are intervals of the sorted lengths. Dynamic programming over the distinct lengths finds the best boundaries.

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
    distinct, counts = np.unique(np.asarray(lengths), return_counts=True)
    ends = np.concatenate([[0], np.cumsum(counts)])
    size = (ends[1:, None] - ends[None, :-1]) * distinct[:, None].astype(np.float64)
    size = np.concatenate([np.full((1, len(distinct)), np.inf), np.where(size > 0, size, np.inf)])
    return order, ends, size


def fill_in_order(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Divide documents, in their order, into mini-batches of at most ``budget`` tokens, or of one longer document.

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
    """Divide documents of similar length as :func:`fill_in_order` does, with padding counted.

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
