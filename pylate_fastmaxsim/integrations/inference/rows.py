"""What a model of late interaction makes of batches, divided into texts.

Behind each batch the hosts choose, normalise and copy the rows of each text, and wait for the GPU each time. Here rows
are chosen and normalised for a whole batch, and a thread takes them to the host while the next batch runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial

import torch
from torch import Tensor

from pylate_fastmaxsim.cpu.live_tokens import live_tokens
from pylate_fastmaxsim.tokens import TokenBatch

# Batches whose rows may be on their way to the host.
_COMING = 2


def rows_of_texts(count: int, batches: Iterator[tuple[list[int], TokenBatch]], *, to_host: bool) -> list[Tensor]:
    """The wanted rows ``[L, d]`` of ``count`` texts in their order, on the device of the model or ``to_host``.

    Of each of the ``batches`` there are the places of its texts among all, and what the model makes of them.
    """
    found: list = [None] * count
    coming: deque[tuple[list[int], Callable[[], list[Tensor]]]] = deque()

    def take(most: int) -> None:
        while len(coming) > most:
            places, rows = coming.popleft()
            for place, own in zip(places, rows(), strict=True):
                found[place] = own

    # Closed, it tokenises no more, whoever still holds an error.
    with closing(batches), ThreadPoolExecutor(1) as thread, torch.no_grad():
        for places, made in batches:
            of_texts = _once_made(made, to_host)
            # On the device in this thread, which has the caller's stream.
            coming.append((places, thread.submit(of_texts).result if to_host else of_texts))
            take(_COMING)
        take(0)
    return found


def _once_made(made: TokenBatch, to_host: bool) -> Callable[[], list[Tensor]]:
    """Rows of each text for when the device has made them; it is not waited for before, nor for what it makes after."""
    values, layout = made.values, (made.starts, made.lengths, made.keep)
    if not values.is_cuda:
        return partial(_of_texts, values, *layout)
    # Into pinned memory, which is used again: what a caller keeps lies in memory of its own.
    values = _copied(values) if to_host else values
    layout = [None if each is None else _copied(each) for each in layout]
    ready = torch.cuda.Event()
    ready.record(torch.cuda.current_stream(made.device))

    def of_texts() -> list[Tensor]:
        ready.synchronize()
        return _of_texts(values, *layout)

    return of_texts


def _of_texts(values: Tensor, starts: Tensor, lengths: Tensor, keep: Tensor | None) -> list[Tensor]:
    """The rows of each text that count, views of one tensor. All but ``values`` are on the host."""
    live = live_tokens(starts, lengths, keep)
    rows = live.row.pin_memory().to(values.device, non_blocking=True) if values.is_cuda else live.row
    return list(values.index_select(0, rows).split(live.count.tolist()))


def _copied(values: Tensor) -> Tensor:
    return torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
