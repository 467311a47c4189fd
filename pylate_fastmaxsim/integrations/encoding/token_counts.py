"""Whether what the collator left with a batch still fits its masks, which a GPU is asked without waiting for it."""

from __future__ import annotations

from collections import deque
from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor

from pylate_fastmaxsim.integrations.encoding.mask_changes import writes_to

# What the patched collator adds to a column.
TOKEN_TOTAL = "token_total"


class _Answer(NamedTuple):
    matches: Tensor  # on the host
    there: torch.cuda.Event


_asked: deque[_Answer] = deque()


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
    >>> sorted(batch), known_total({"input_ids": mask, "attention_mask": batch["query_attention_mask"]})
    (['query_attention_mask', 'query_input_ids'], 3)
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


def known_total(column: dict[str, Tensor]) -> int | None:
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
    return total if mask.device.type != "cpu" or matches(mask, total) else None


def matches(attention_mask: Tensor, total: int) -> Tensor:
    """Whether a mask ``[N, L]`` attends to so many tokens, with no gaps between them, as a tensor on its device.

    Examples
    --------
    >>> matches(torch.tensor([[1, 1], [1, 0]]), 3), matches(torch.tensor([[1, 1], [0, 1]]), 3)
    (tensor(True), tensor(False))
    """
    attended = attention_mask != 0
    return (attended.sum() == total) & ~(attended[:, 1:] & ~attended[:, :-1]).any()


def verify_async(attention_mask: Tensor, total: int) -> None:
    """Have a GPU look whether a batch fits. What it says is heard when it has said it and a later batch is asked about.

    Raises
    ------
    ValueError
        An earlier batch did not fit.
    """
    if attention_mask.is_cuda:
        _poll(matches(attention_mask, total))


def _poll(answer: Tensor) -> None:
    while _asked and _asked[0].there.query():
        if not _asked.popleft().matches:
            reset()
            raise ValueError(
                "The masks of an earlier batch were changed after their collator, which had left with them how many tokens "
                "they have, so that losses since then are wrong: leave token_total out of the columns that you change, "
                "or train with enable(padding_free=False)."
            )
    host = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=True).copy_(answer, non_blocking=True)
    there = torch.cuda.Event()
    there.record(torch.cuda.current_stream(answer.device))
    _asked.append(_Answer(host, there))


def reset() -> None:
    """Look at no answer that is still to come."""
    _asked.clear()
