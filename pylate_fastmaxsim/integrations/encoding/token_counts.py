"""Whether what the collator left with a batch still fits its masks, which a GPU is asked without waiting for it."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor


class _Answer(NamedTuple):
    matches: Tensor  # on the host
    there: torch.cuda.Event


_asked: deque[_Answer] = deque()


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
