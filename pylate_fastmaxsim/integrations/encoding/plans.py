"""The documents of a batch, and the encoder calls that encode them with and without padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from pylate_fastmaxsim.integrations.encoding import token_counts
from pylate_fastmaxsim.integrations.encoding.attention import packed_mask
from pylate_fastmaxsim.integrations.encoding.batching import (
    fill_by_length,
    fill_in_order,
    group_by_length,
    number_of_groups,
    split_until,
)
from pylate_fastmaxsim.integrations.encoding.mask_changes import writes_to
from pylate_fastmaxsim.tokens import TokenBatch

# What the patched collator adds to a column; see pylate_collator.
TOKEN_TOTAL = "token_total"

# Of how many calls this process needs, how many all make.
AgreeOnNumber = Callable[[int], int]


@dataclass(frozen=True)
class Documents:
    """Padded documents of all columns of a batch, one below the other.

    Parameters
    ----------
    input_ids, attention_mask
        ``[N, L]``.
    token_type_ids
        ``[N, L]``, or None where the tokenizer makes none.
    token_index
        Positions ``row * L + column`` of the attended tokens, ``[T]``, int64, ascending.
    cu_seqlens
        First attended token of each document in ``token_index`` and their number, ``[N + 1]``, int32.
    gaps
        Whether a document has a token that is not attended to before one that is. Packed, the two sides of it would
        be neighbours.
    """

    input_ids: Tensor
    attention_mask: Tensor
    token_type_ids: Tensor | None
    token_index: Tensor
    cu_seqlens: Tensor
    gaps: bool = False

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    @property
    def max_length(self) -> int:
        """Length L that the documents are padded to."""
        return self.input_ids.shape[1]

    @property
    def column(self) -> dict[str, Tensor]:
        """The documents as a tokenizer makes them, to call a model with."""
        types = {} if self.token_type_ids is None else {"token_type_ids": self.token_type_ids}
        return {"input_ids": self.input_ids, "attention_mask": self.attention_mask, **types}

    @classmethod
    def from_columns(cls, columns: Sequence[dict[str, Tensor]]) -> Documents:
        """Put the tokenized columns of a batch below each other.

        Where the collator left with every column how many tokens are attended to, nothing here waits for the device.
        Where it did not, or where a column has not its shape any more, they are counted, which waits for a CUDA device.

        Raises
        ------
        ValueError
            On a CUDA device, what the collator left with an earlier batch did not fit its masks any more.
        """
        length = max(column["input_ids"].shape[1] for column in columns)
        attention_mask = _stack(columns, "attention_mask", length)
        token_index, cu_seqlens, left = attended_tokens(columns, attention_mask)
        has_types = any("token_type_ids" in column for column in columns)
        return cls(
            input_ids=_stack(columns, "input_ids", length),
            attention_mask=attention_mask,
            token_type_ids=_stack(columns, "token_type_ids", length) if has_types else None,
            token_index=token_index,
            cu_seqlens=cu_seqlens,
            gaps=not left and has_gaps(attention_mask),
        )


@dataclass(frozen=True)
class EncodingPlan:
    """The encoder calls that together encode the documents of a batch.

    Parameters
    ----------
    calls
        Features to call the model with, one dictionary per call.
    keep
        For each call, which of its rows of token embeddings count, flattened, bool.
    starts, lengths
        Where each document lies in the rows of all calls together, ``[N]``, int64.
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
        Says of token ids which of them do not count, bool.
    token_budget
        Tokens per mini-batch. Dividing waits for the device once.
    agree
        Returns the number of calls that all processes make for the number that this one would make: of mini-batches at
        least as many, without a budget at most.
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
    extents = _extents(documents.attention_mask)
    lengths = extents.clamp(min=1).tolist()
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
    return EncodingPlan(calls, keep, torch.tensor(starts, device=device), extents, max(lengths))


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
    lengths = [_extents(column["attention_mask"]) for column in columns]
    longest = max(column["input_ids"].shape[1] for column in columns)
    return EncodingPlan(calls, keep, torch.cat(starts), torch.cat(lengths), longest, as_stock=True)


def nothing_skipped(input_ids: Tensor) -> Tensor:
    """For a plan in which every token that is attended to counts."""
    return torch.zeros_like(input_ids, dtype=torch.bool)


def attended_index(attention_mask: Tensor, total: int | None = None) -> tuple[Tensor, Tensor]:
    """Positions of the attended tokens of a padded batch, and where each row begins among them.

    Parameters
    ----------
    attention_mask
        ``[N, L]``, 0/1.
    total
        How many are attended to, T, where that is known; otherwise the device is asked, and waited for. With another
        number than there are, the positions are wrong, but all of them exist.

    Returns
    -------
    tuple of Tensor
        Positions ``row * L + column``, ``[T]``, int64, and ``cu_seqlens``, ``[N + 1]``, int32.

    Examples
    --------
    >>> mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    >>> attended_index(mask)
    (tensor([0, 1, 3]), tensor([0, 2, 3], dtype=torch.int32))
    >>> attended_index(mask, total=3)
    (tensor([0, 1, 3]), tensor([0, 2, 3], dtype=torch.int32))
    """
    attended = attention_mask != 0
    cu_seqlens = F.pad(attended.sum(dim=1).cumsum(0), (1, 0)).int()
    attended = attended.reshape(-1)
    if total is None:
        return attended.nonzero().squeeze(1), cu_seqlens
    # A token is where as many as it has before it, and itself, are counted for the first time.
    place = torch.arange(1, total + 1, device=attended.device)
    token_index = torch.searchsorted(attended.cumsum(0), place)
    return token_index.clamp_(max=max(len(attended) - 1, 0)), cu_seqlens.clamp_(max=total)


def attended_tokens(columns: Sequence[dict[str, Tensor]], attention_mask: Tensor) -> tuple[Tensor, Tensor, bool]:
    """The same of tokenized columns, whose masks ``attention_mask`` has one below the other.

    Returns also whether their collator had left how many tokens are attended to, so that nothing waited for the device.

    Examples
    --------
    >>> mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    >>> column = {"input_ids": mask, "attention_mask": mask}
    >>> attended_tokens([column], mask)
    (tensor([0, 1, 3]), tensor([0, 2, 3], dtype=torch.int32), False)
    >>> attended_tokens([{**column, **total_to_leave(mask)}], mask)[2]
    True
    """
    totals = [_left(column) for column in columns]
    if None in totals:
        return *attended_index(attention_mask), False
    token_counts.verify_async(attention_mask, sum(totals))
    return *attended_index(attention_mask, sum(totals)), True


def total_to_leave(attention_mask: Tensor) -> dict[str, Tensor]:
    """What the collator leaves with a column ``[N, L]``: how many of its tokens are attended to.

    Examples
    --------
    >>> total_to_leave(torch.tensor([[1, 1, 0], [1, 0, 0]]))["token_total"].shape
    torch.Size([2, 3, 0, 5, 3])
    """
    # The host knows shapes, and would have to wait for what a tensor on a device holds. So the number is the last size
    # of a tensor without elements. It has the rows of its column: whoever splits, picks or reorders the rows of
    # everything does so with it. And whoever cuts it or the column, by rows (a loss in mini-batches, accelerate when it
    # dispatches) or by columns (whoever trims a batch to its longest text), leaves other rows and columns than the sum
    # that is its last but one size.
    count, width = attention_mask.shape
    total = int((attention_mask != 0).sum())
    return {TOKEN_TOTAL: torch.empty(count, width, 0, count + width, total, dtype=torch.bool)}


def attach_token_counts(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """A batch without what the collator left, which the masks then carry: for as long as nobody makes others of them.

    Examples
    --------
    >>> mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    >>> left = {f"query_{part}": value for part, value in total_to_leave(mask).items()}
    >>> batch = attach_token_counts({"query_input_ids": mask, "query_attention_mask": mask, **left})
    >>> sorted(batch), attended_tokens([{"input_ids": mask, "attention_mask": batch["query_attention_mask"]}], mask)[2]
    (['query_attention_mask', 'query_input_ids'], True)
    """
    left = set()
    for key, mask in batch.items():
        if key.endswith("_attention_mask"):
            name = key.removesuffix("attention_mask") + TOKEN_TOTAL
            if name in batch:
                mask.fastmaxsim_total = batch[name], writes_to(mask)
                left.add(name)
    if left:
        # Of the type that it has, which somebody's own compute_loss may know.
        batch = copy(batch)
        for key in left:
            del batch[key]
    return batch


def without_total(features: dict[str, Tensor]) -> dict[str, Tensor]:
    """Features as stock PyLate's collator makes them."""
    return {key: value for key, value in features.items() if key != TOKEN_TOTAL}


def rows_of(features: dict[str, object], begin: int, end: int) -> dict[str, object]:
    """Some of the texts of a column. What is not one value for each text, as a scalar or a name, goes with all of them.

    Examples
    --------
    >>> rows_of({"input_ids": torch.tensor([[1], [2]]), "keys": ["a", "b"], "prompt_length": 3}, 1, 2)
    {'input_ids': tensor([[2]]), 'keys': ['b'], 'prompt_length': 3}
    """
    count = len(features["input_ids"])
    return {key: value[begin:end] if _has_rows(value, count) else value for key, value in features.items()}


def padded_again(states: Tensor, index: Tensor, count: int, width: int, filler: Tensor) -> Tensor:
    """States ``[T, d]`` at their places ``row * width + column``, ``[count, width, d]``, and ``filler`` between them.

    Not zeros, as :meth:`~pylate_fastmaxsim.TokenBatch.to_padded` has: somebody's own normalisation, in a module or in a
    loss, may divide by the length of each token's state.

    Examples
    --------
    >>> states = torch.tensor([[1.0], [2.0]])
    >>> padded_again(states, torch.tensor([0, 2]), count=2, width=2, filler=states[:1]).squeeze(-1)
    tensor([[1., 1.],
            [2., 1.]])
    """
    filled = filler.detach().repeat(count * width, 1)
    return filled.index_copy_(0, index, states).view(count, width, -1)


def has_gaps(attention_mask: Tensor) -> bool:
    """Whether a row of a mask ``[N, L]``, 0/1, has a 0 before a 1. Waits for the device.

    Examples
    --------
    >>> has_gaps(torch.tensor([[1, 1, 0]])), has_gaps(torch.tensor([[1, 0, 1]]))
    (False, True)
    """
    attended = attention_mask != 0
    return bool((attended[:, 1:] & ~attended[:, :-1]).any())


def column_has_gaps(column: dict[str, Tensor]) -> bool:
    """The same of a tokenized column. Waits for the device where the collator did not look."""
    return _left(column) is None and has_gaps(column["attention_mask"])


def _left(column: dict[str, Tensor]) -> int | None:
    """How many tokens are attended to, if the collator left it, and the column has its shape since.

    On a CPU, where it costs nothing to look, also if the mask has so many since.
    """
    left, mask = column.get(TOKEN_TOTAL), column["attention_mask"]
    if left is None:
        left, writes = getattr(mask, "fastmaxsim_total", (None, 0))
        if left is None or writes != writes_to(mask):
            return None
    count, width = mask.shape
    total = left.shape[-1]
    if column["input_ids"].shape != mask.shape or left.shape != (count, width, 0, count + width, total):
        return None
    return total if mask.device.type != "cpu" or token_counts.matches(mask, total) else None


def _has_rows(value: object, count: int) -> bool:
    if isinstance(value, Tensor):
        return value.shape[:1] == (count,)
    return isinstance(value, list) and len(value) == count


def _stack(columns: Sequence[dict[str, Tensor]], key: str, length: int) -> Tensor:
    # Of token types, all that may be missing, an encoder takes 0 where it is given none.
    parts = [column[key] if key in column else torch.zeros_like(column["input_ids"]) for column in columns]
    parts = [F.pad(part, (0, length - part.shape[1])) for part in parts]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def counting(column: dict[str, Tensor], skipped: Callable[[Tensor], Tensor]) -> Tensor:
    """Which tokens of padded texts count, ``[N, L]``, bool: attended to and not skipped."""
    return column["attention_mask"].bool() & ~skipped(column["input_ids"])


def _extents(attention_mask: Tensor) -> Tensor:
    """Columns up to and with the last attended one, ``[N]``, int64."""
    columns = torch.arange(1, attention_mask.shape[1] + 1, device=attention_mask.device)
    return (attention_mask.bool() * columns).amax(dim=1)
