"""What a model of late interaction makes of batches, divided into texts.

Behind each batch the hosts choose, normalise and copy the rows of each text, and wait for the GPU each time. Here rows
are chosen and normalised for a whole batch, and a thread takes them to the host while the next batch runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from pylate_fastmaxsim.integrations.inference.batches import Batch
from pylate_fastmaxsim.ops.token_pooling import pool_tokens
from pylate_fastmaxsim.tokens import TokenBatch

# Batches whose rows may be on their way to the host.
_COMING = 2


@dataclass(frozen=True)
class Rows:
    """What a model of late interaction makes of a batch: rows ``values`` ``[R, d]``, one text after the other."""

    values: Tensor
    keep: Tensor  # which of the rows are wanted, [R], bool, on the host once they are divided
    # Rows of each text, those that are not wanted included; a tensor where the device alone knows them.
    lengths: Sequence[int] | Tensor

    @classmethod
    def pooled(cls, documents: TokenBatch, factor: float, protected: int, normalize: bool) -> Rows:
        """Those of documents that are pooled on the device, which is not waited for."""
        pooled = pool_tokens(documents, factor, protected=protected, normalize=normalize)
        rows = torch.arange(len(pooled.values), device=pooled.device)
        text = torch.searchsorted(pooled.starts, rows, right=True) - 1
        keep = rows < (pooled.starts + pooled.lengths)[text]
        return cls(pooled.values, keep, pooled.starts.diff(append=pooled.starts.new_full((1,), len(rows))))

    def of_texts(self) -> list[Tensor]:
        """The wanted rows of each text, views of one tensor."""
        ends = np.cumsum([0, *np.asarray(self.lengths)])
        wanted = np.concatenate([[0], self.keep.numpy().cumsum()])[ends]
        rows = self.keep.nonzero().flatten()
        if self.values.is_cuda:
            rows = rows.pin_memory().to(self.values.device, non_blocking=True)
        return list(self.values.index_select(0, rows).split(np.diff(wanted).tolist()))


def rows_of_texts(
    count: int, batches: Iterator[Batch], embed: Callable[[Batch], Rows], *, to_host: bool
) -> list[Tensor]:
    """The wanted rows ``[L, d]`` of ``count`` texts in their order, on the device of the model or ``to_host``."""
    found: list = [None] * count
    coming: deque[tuple[list[int], Callable[[], list[Tensor]]]] = deque()

    def take(most: int) -> None:
        while len(coming) > most:
            indices, rows = coming.popleft()
            for index, own in zip(indices, rows(), strict=True):
                found[index] = own

    # Closed, it tokenises no more, whoever still holds an error.
    with closing(batches), ThreadPoolExecutor(1) as thread, torch.no_grad():
        for batch in batches:
            of_texts = _once_made(batch.embedded(embed), to_host)
            # On the device in this thread, which has the caller's stream.
            coming.append((batch.indices, thread.submit(of_texts).result if to_host else of_texts))
            take(_COMING)
        take(0)
    return found


def _once_made(rows: Rows, to_host: bool) -> Callable[[], list[Tensor]]:
    """Rows of each text for when the device has made them; it is not waited for before, nor for what it makes after."""
    if not rows.values.is_cuda:
        return rows.of_texts
    # Into pinned memory, which is used again: what a caller keeps lies in memory of its own.
    coming = replace(rows, values=_copied(rows.values) if to_host else rows.values, keep=_copied(rows.keep))
    if torch.is_tensor(rows.lengths):
        coming = replace(coming, lengths=_copied(rows.lengths))
    ready = torch.cuda.Event()
    ready.record(torch.cuda.current_stream(rows.values.device))

    def of_texts() -> list[Tensor]:
        ready.synchronize()
        return coming.of_texts()

    return of_texts


def _copied(values: Tensor) -> Tensor:
    return torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
