"""Batches on a device. For a GPU a thread reads ahead."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from pylate_fastmaxsim.compressed import CompressedBatch
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


def joined(batches: Sequence[Batch]) -> Batch:
    """Batches of one format on one device, of documents without rows between them, as one."""
    if len(batches) == 1:
        return batches[0]
    lengths, longest = torch.cat([batch.lengths for batch in batches]), max(batch.max_length for batch in batches)
    starts = lengths.cumsum(0) - lengths

    def rows(parts: Sequence[Any]) -> Any:
        return torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0]

    if isinstance(batches[0], TokenBatch):
        return TokenBatch(rows([batch.values for batch in batches]), starts, lengths, longest, gapless=True)
    parts = [batch.tokens for batch in batches]
    tokens = replace(
        parts[0], **{each.name: rows([getattr(part, each.name) for part in parts]) for each in fields(parts[0])}
    )
    return CompressedBatch(tokens, starts, lengths, longest, gapless=True)


def streamed(device: torch.device, pieces: Sequence[Piece]) -> Iterator[Batch]:
    """Batches on a CUDA device, copied on a stream of their own."""
    if not pieces:
        return
    for part in {id(part): part for part, _, _ in pieces}.values():
        if part.format.codec is not None:
            part.format.codec.to(device)  # copied once, on the caller's stream
    buffers = [_pinned(pieces) for _ in pieces[:IN_FLIGHT]]
    copied: list[torch.cuda.Event | None] = [None] * len(buffers)  # the end of the last copy from each
    stream = torch.cuda.Stream(device)

    def load(number: int, scored: torch.cuda.Event | None) -> tuple[Batch, list[Tensor], torch.cuda.Event]:
        place = number % IN_FLIGHT
        if scored is not None:
            copied[place].synchronize()
            scored.synchronize()
        part, begin, end = pieces[number]
        arrays, bounds, longest = part.views(begin, end)
        staged = {name: buffers[place][name][: len(array)].copy_(array) for name, array in arrays.items()}
        with torch.cuda.device(device), torch.cuda.stream(stream):
            loaded = batch_on(device, part.format, staged, bounds.pin_memory(), longest)
            copied[place] = stream.record_event()
        return *loaded, copied[place]

    def scored() -> torch.cuda.Event:
        return torch.cuda.current_stream(device).record_event()

    # Without waiting for what the caller queued, copies would run ahead of it and fill the device.
    for batch, tensors, loaded in read_ahead(len(pieces), IN_FLIGHT, load, scored):
        current = torch.cuda.current_stream(device)
        current.wait_event(loaded)
        for tensor in tensors:
            tensor.record_stream(current)
        yield batch
        del batch, tensors, tensor


def _pinned(pieces: Sequence[Piece]) -> Arrays:
    """Room for the largest of the batches."""
    documents = max(end - begin for _, begin, end in pieces)
    tokens = max(int(part.bounds[end] - part.bounds[begin]) for part, begin, end in pieces)
    return {
        name: torch.empty(column.shape(documents, tokens), dtype=column.dtype, device="cpu", pin_memory=True)
        for name, column in pieces[0][0].format.columns.items()
    }


def read_ahead(
    count: int, ahead: int, load: Callable[[int, Any], Any], mark: Callable[[], Any] = lambda: None
) -> Iterator[Any]:
    """``load(number, marked)`` of each number below ``count`` in order, by a thread that reads ``ahead`` of them ahead.

    A number is loaded when the caller asks for the one behind the ``ahead``-th before it. ``marked`` is what ``mark``
    returned then, in the caller's thread; None for the first ones. An error of ``load`` is raised in its turn. The thread
    ends with the iteration.
    """
    reader = ThreadPoolExecutor(1, thread_name_prefix="corpus-reader")
    try:
        loading = deque(reader.submit(load, number, None) for number in range(min(count, ahead)))
        for following in range(ahead, count + ahead):
            yield loading.popleft().result()  # and kept by nobody here, so that it is freed before more is loaded
            if following < count:
                loading.append(reader.submit(load, following, mark()))
    finally:
        reader.shutdown(cancel_futures=True)
