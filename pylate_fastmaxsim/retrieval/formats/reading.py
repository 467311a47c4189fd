"""Batches on a device. For a GPU a thread reads ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pylate_fastmaxsim.retrieval.formats.format import Arrays, Batch, Format
from pylate_fastmaxsim.retrieval.formats.part import Part
from pylate_fastmaxsim.tokens import TokenBatch

# Batches in flight for a GPU: one is read while one is copied and one is scored.
IN_FLIGHT = 3

# Documents of a part, from the first to before the second number.
Piece = tuple[Part, int, int]


def batch_on(
    device: torch.device, format: Format, arrays: Arrays, bounds: Tensor, longest: int
) -> tuple[Batch, list[Tensor]]:
    """A batch on the device, without a copy if it is there already, and its tensors."""
    arrays = {name: array.to(device, non_blocking=True) for name, array in arrays.items()}
    bounds = bounds.to(device, non_blocking=True)
    starts, lengths = bounds[:-1], bounds.diff()
    return format.decode(arrays, starts, lengths, longest), [*arrays.values(), starts, lengths]


def batch_to(batch: Batch, device: torch.device) -> Batch:
    """Copy a batch to a device."""
    if not isinstance(batch, TokenBatch):
        return batch.to(device)
    tensors = (tensor.to(device) for tensor in (batch.values, batch.starts, batch.lengths))
    return TokenBatch(*tensors, batch.max_length, gapless=batch.gapless)


def streamed(device: torch.device, pieces: Sequence[Piece]) -> Iterator[Batch]:
    """Batches on a CUDA device, copied on a stream of their own."""
    if not pieces:
        return
    for part in {id(part): part for part, _, _ in pieces}.values():
        if part.format.codec is not None:
            part.format.codec.to(device)  # copied once, on the caller's stream
    slots = [_Slot(_pinned(pieces)) for _ in pieces[:IN_FLIGHT]]
    stream = torch.cuda.Stream(device)

    def load(
        piece: Piece, slot: _Slot, scored: torch.cuda.Event | None
    ) -> tuple[Batch, list[Tensor], torch.cuda.Event]:
        if scored is not None:
            slot.copied.synchronize()
            scored.synchronize()
        part, begin, end = piece
        arrays, bounds, longest = part.views(begin, end)
        staged = {name: slot.pinned[name][: len(array)].copy_(array) for name, array in arrays.items()}
        with torch.cuda.device(device), torch.cuda.stream(stream):
            loaded = batch_on(device, part.format, staged, bounds.pin_memory(), longest)
            slot.copied = stream.record_event()
        return *loaded, slot.copied

    # Without waiting for what the caller queued, copies would run ahead of it and fill the device.
    for batch, tensors, copied in read_ahead(
        pieces, slots, load, lambda: torch.cuda.current_stream(device).record_event()
    ):
        current = torch.cuda.current_stream(device)
        current.wait_event(copied)
        for tensor in tensors:
            tensor.record_stream(current)
        yield batch
        del batch, tensors, tensor


@dataclass
class _Slot:
    """Buffers in pinned memory, and the event of the last copy from them."""

    pinned: Arrays
    copied: torch.cuda.Event | None = None


def _pinned(pieces: Sequence[Piece]) -> Arrays:
    """Room for the largest of the batches."""
    documents = max(end - begin for _, begin, end in pieces)
    tokens = max(int(part.bounds[end] - part.bounds[begin]) for part, begin, end in pieces)
    return {
        name: torch.empty(column.shape(documents, tokens), dtype=column.dtype, device="cpu", pin_memory=True)
        for name, column in pieces[0][0].format.columns.items()
    }


def read_ahead(
    parts: Sequence[Any], slots: Sequence[Any], load: Callable[[Any, Any, Any], Any], mark: Callable[[], Any]
) -> Iterator[Any]:
    """``load(part, slot, marked)`` of each part in order, by a thread that reads as many parts ahead as there are slots.

    A slot is used again when the caller asks for the next part. ``marked`` is what ``mark`` returned then, in the
    caller's thread; None for a new slot. An error of ``load`` is raised in its turn. The thread ends with the iteration.
    """
    reader = ThreadPoolExecutor(1, thread_name_prefix="corpus-reader")
    try:
        loading = deque((reader.submit(load, part, slot, None), slot) for part, slot in zip(parts, slots, strict=False))
        for number in range(len(parts)):
            future, slot = loading.popleft()
            loaded = future.result()
            yield loaded
            # Freed before more is loaded.
            del future, loaded
            if number + len(slots) < len(parts):
                loading.append((reader.submit(load, parts[number + len(slots)], slot, mark()), slot))
    finally:
        reader.shutdown(cancel_futures=True)
