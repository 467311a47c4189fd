"""The documents of a batch, and the encoder calls that encode them with and without padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from pylate_fastmaxsim.integrations import left_behind
from pylate_fastmaxsim.integrations.attention import packed_mask
from pylate_fastmaxsim.integrations.changed_masks import writes_to
from pylate_fastmaxsim.integrations.grouping import (
    fill_by_length,
    fill_in_order,
    group_by_length,
    number_of_groups,
    split_until,
)
from pylate_fastmaxsim.tokens import TokenBatch

# What the patched collator adds to a column; see pylate_collator.
TOKEN_INDEX = "token_index"
CU_SEQLENS = "cu_seqlens"

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

        Where the collator left the positions of the attended tokens with the column, nothing here
        waits for the device. Where it did not, or where they have not the shape of the column any more, they
        are computed, which on a CUDA device waits for it twice per column.

        Raises
        ------
        ValueError
            On a CUDA device, what the collator left with an earlier batch did not fit its masks any more.
        """
        length = max(column["input_ids"].shape[1] for column in columns)
        token_index, cu_seqlens, gaps, rows, tokens = [], [], False, 0, 0
        asked = False
        for column in columns:
            left = _left(column)
            asked = asked or left is not None
            gaps = gaps or (left is None and has_gaps(column["attention_mask"]))
            index, ends = left or attended_index(column["attention_mask"])
            count, width = column["input_ids"].shape
            if width != length:
                index = index // width * length + index % width
            token_index.append(index + rows * length)
            cu_seqlens.append(ends[min(rows, 1) :] + tokens)
            rows += count
            tokens += len(index)
        has_types = any("token_type_ids" in column for column in columns)
        documents = cls(
            input_ids=_stack(columns, "input_ids", length),
            attention_mask=_stack(columns, "attention_mask", length),
            token_type_ids=_stack(columns, "token_type_ids", length) if has_types else None,
            token_index=torch.cat(token_index),
            cu_seqlens=torch.cat(cu_seqlens),
            gaps=gaps,
        )
        if asked:
            left_behind.ask(documents.attention_mask, documents.token_index, documents.cu_seqlens)
        return documents


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
        groups = group_by_length(lengths, agree(number_of_groups(len(documents))))
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
    columns = [without_index(column) for column in columns]
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


def attended_index(attention_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of the attended tokens of a padded batch, and where each row begins among them.

    Parameters
    ----------
    attention_mask
        ``[N, L]``, 0/1.

    Returns
    -------
    tuple of Tensor
        Positions ``row * L + column``, ``[T]``, int64, and ``cu_seqlens``, ``[N + 1]``, int32.

    Examples
    --------
    >>> attended_index(torch.tensor([[1, 1, 0], [1, 0, 0]]))
    (tensor([0, 1, 3]), tensor([0, 2, 3], dtype=torch.int32))
    """
    attended = attention_mask != 0
    cu_seqlens = F.pad(attended.sum(dim=1).cumsum(0), (1, 0)).int()
    return attended.reshape(-1).nonzero().squeeze(1), cu_seqlens


def left_index(column: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The same of a tokenized column, as its collator left it or else computed, which waits for a CUDA device.

    Examples
    --------
    >>> left_index({"attention_mask": torch.tensor([[1, 1, 0], [1, 0, 0]])})
    (tensor([0, 1, 3]), tensor([0, 2, 3], dtype=torch.int32))
    """
    return _left(column) or attended_index(column["attention_mask"])


def index_to_leave(attention_mask: Tensor) -> dict[str, Tensor]:
    """What the collator leaves with a column, for :func:`left_index` to find."""
    token_index, cu_seqlens = attended_index(attention_mask)
    # Whoever cuts a column afterwards may cut these too, and wrongly: by rows (a loss in mini-batches, accelerate when
    # it dispatches) or by columns (whoever trims a batch to its longest text). The leading dimension of 1, and behind
    # the N + 1 ends as many zeros as the column is wide, make every such cut of these or of the column show in shapes,
    # which are known without waiting for the device.
    ends = F.pad(cu_seqlens, (0, attention_mask.shape[1]))
    return {TOKEN_INDEX: token_index.unsqueeze(0), CU_SEQLENS: ends.unsqueeze(0)}


def with_index_at_masks(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """A batch without what the collator left, which the masks then carry: for as long as nobody makes others of them.

    Examples
    --------
    >>> mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    >>> left = {f"query_{part}": value for part, value in index_to_leave(mask).items()}
    >>> batch = with_index_at_masks({"query_input_ids": mask, "query_attention_mask": mask, **left})
    >>> sorted(batch), left_index({"input_ids": mask, "attention_mask": batch["query_attention_mask"]})
    (['query_attention_mask', 'query_input_ids'], (tensor([0, 1, 3]), tensor([0, 2, 3], dtype=torch.int32)))
    """
    left = set()
    for key, mask in batch.items():
        if key.endswith("_attention_mask"):
            names = [key.removesuffix("attention_mask") + part for part in (TOKEN_INDEX, CU_SEQLENS)]
            if all(name in batch for name in names):
                mask.fastmaxsim_index = *(batch[name] for name in names), writes_to(mask)
                left.update(names)
    if left:
        # Of the type that it has, which somebody's own compute_loss may know.
        batch = copy(batch)
        for key in left:
            del batch[key]
    return batch


def without_index(features: dict[str, Tensor]) -> dict[str, Tensor]:
    """Features as stock PyLate's collator makes them."""
    return {key: value for key, value in features.items() if key not in (TOKEN_INDEX, CU_SEQLENS)}


def rows_of(features: dict[str, object], begin: int, end: int) -> dict[str, object]:
    """Some of the texts of a column. What is not one value for each text, as a scalar or a name, goes with all of them.

    Examples
    --------
    >>> rows_of({"input_ids": torch.tensor([[1], [2]]), "keys": ["a", "b"], "prompt_length": 3}, 1, 2)
    {'input_ids': tensor([[2]]), 'keys': ['b'], 'prompt_length': 3}
    """
    count = len(features["input_ids"])
    return {key: value[begin:end] if _has_rows(value, count) else value for key, value in features.items()}


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


def _left(column: dict[str, Tensor]) -> tuple[Tensor, Tensor] | None:
    """What :func:`left_index` returns if the collator left it, and the column has its shape since.

    On a CPU, where it costs nothing to look, also if the column has its masks since.
    """
    index, ends, mask = column.get(TOKEN_INDEX), column.get(CU_SEQLENS), column["attention_mask"]
    if index is None or ends is None:
        index, ends, writes = getattr(mask, "fastmaxsim_index", (None, None, 0))
        if index is None or writes != writes_to(mask):
            return None
    count, width = mask.shape
    if column["input_ids"].shape != mask.shape or len(index) != 1 or ends.shape != (1, count + 1 + width):
        return None
    if not index.device == ends.device == mask.device:  # whoever moves a batch may move only what is known
        return None
    index, ends = index[0], ends[0, : count + 1]
    return (index, ends) if mask.device.type != "cpu" or left_behind.fits(mask, index, ends) else None


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
