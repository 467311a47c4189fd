"""Token embeddings of a corpus on disk, read through a memory map in batches for search."""

from __future__ import annotations

import json
import math
import mmap
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pylate_fastmaxsim._checks import require_count, require_integer
from pylate_fastmaxsim.cpu.live_tokens import live_tokens
from pylate_fastmaxsim.retrieval.checks import require_batches
from pylate_fastmaxsim.tokens import TokenBatch

# Written last, so that a folder with this file is complete.
DESCRIPTION_FILE = "corpus.json"
VALUES_FILE = "values.bin"  # [T, d], token after token
BOUNDS_FILE = "bounds.bin"  # [N + 1], int64, where documents begin and end, as cu_seqlens
FORMAT = "pylate-fastmaxsim corpus 1"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

TOKENS_PER_BATCH = 1 << 20

# Batches in flight for a GPU: one is read while one is copied and one is scored.
IN_FLIGHT = 3


def write_corpus(
    folder: str | os.PathLike, batches: Iterable[TokenBatch], dtype: torch.dtype = torch.bfloat16
) -> Corpus:
    """Write token embeddings to a folder, batch after batch, and open it.

    Only tokens that count are written: no padding, and none that ``keep`` leaves out. A document without tokens stays a
    document. The folder is a corpus once everything is written; one that an interrupted call leaves is refused.

    Parameters
    ----------
    folder
        Where to write, empty or yet to be made.
    batches
        Batches of documents, all of one d, on any device; they may come from a generator.
    dtype
        What vectors are rounded to on disk: torch.bfloat16, torch.float16 or torch.float32.

    Raises
    ------
    ValueError
        The folder is not empty, there is no batch, batches differ in d, ``dtype`` is another, or a number is too large
        for it.
    TypeError
        Documents are one batch and not several, or something in them is no ``TokenBatch``.
    OSError
        Writing fails, as on a full disk.

    Examples
    --------
    >>> import tempfile, torch
    >>> from pylate_fastmaxsim import TokenBatch
    >>> from pylate_fastmaxsim.retrieval.corpus import write_corpus
    >>> from pylate_fastmaxsim.retrieval.search import search
    >>> batches = (TokenBatch.from_list([size * torch.eye(2), torch.ones(1, 2)]) for size in (2.0, 3.0))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     corpus = write_corpus(folder, batches, torch.float32)
    ...     len(corpus), corpus.tokens, corpus.dim
    ...     search(TokenBatch.from_list([torch.eye(2)]), corpus.batches(), k=2)
    (4, 6, 2)
    (tensor([[6., 4.]]), tensor([[2, 0]]))
    """
    if dtype not in DTYPES.values():
        raise ValueError(f"write_corpus: dtype must be one of {', '.join(map(str, DTYPES.values()))}, got {dtype}.")
    require_batches("write_corpus", "batches", batches)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ValueError(f"write_corpus: {folder} must be empty; choose another folder, or remove what it holds.")
    try:
        sizes = _write(folder, batches, dtype)
    except (TypeError, ValueError):
        # So that the folder is empty for the corrected call.
        for name in (VALUES_FILE, BOUNDS_FILE):
            (folder / name).unlink()
        raise
    name = next(name for name, known in DTYPES.items() if known == dtype)
    description = {"format": FORMAT, **sizes, "dtype": name}
    scratch = folder / f"{DESCRIPTION_FILE}.unfinished"
    scratch.write_text(json.dumps(description) + "\n")
    os.replace(scratch, folder / DESCRIPTION_FILE)
    return Corpus(folder)


def _write(folder: Path, batches: Iterable[TokenBatch], dtype: torch.dtype) -> dict[str, int]:
    """Write vectors and bounds; return the number of documents and tokens, and d."""
    dim, documents, tokens = None, 0, 0
    with open(folder / VALUES_FILE, "xb") as values_file, open(folder / BOUNDS_FILE, "xb") as bounds_file:
        _append(bounds_file, torch.zeros(1, dtype=torch.int64, device="cpu"))
        for batch in batches:
            if not isinstance(batch, TokenBatch):
                raise TypeError(f"write_corpus: each of batches must be a TokenBatch, got {type(batch).__name__}.")
            dim = batch.dim if dim is None else dim
            if batch.dim != dim:
                raise ValueError(f"write_corpus: all batches must have the same d, got {dim} and {batch.dim}.")
            live = live_tokens(batch.starts, batch.lengths, batch.keep)
            vectors = batch.values.detach()[live.row]
            rounded = vectors.to(dtype)
            if bool((rounded.isinf() & vectors.isfinite()).any()):
                raise ValueError(f"write_corpus: vectors hold numbers that are too large for {dtype}.")
            _append(values_file, rounded.cpu())
            _append(bounds_file, tokens + live.count.cumsum(0).cpu())
            documents += len(batch)
            tokens += len(live.row)
        for file in (values_file, bounds_file):
            # A power cut must not leave a description of data that was never written.
            file.flush()
            os.fsync(file.fileno())
    if dim is None:
        raise ValueError("write_corpus: there must be at least one batch, which says what d is.")
    return {"documents": documents, "tokens": tokens, "dim": dim}


def _append(file, tensor: Tensor) -> None:
    # The error of numpy's tofile does not say that the disk is full.
    file.write(tensor.contiguous().view(torch.uint8).flatten().numpy().data)


class Corpus:
    """Token embeddings that :func:`write_corpus` has written.

    ``len`` is the number of documents, ``tokens`` that of their vectors; ``dim`` and ``dtype`` are those of the vectors.

    Opening reads only the sizes. The files are mapped into memory, and the operating system reads and caches what is
    used. If a file is truncated while it is mapped, or the disk fails, reading ends the process (SIGBUS) without a
    Python error.

    Parameters
    ----------
    folder
        Where the corpus is.

    Raises
    ------
    ValueError
        The folder holds no complete corpus, or its files do not fit together.
    OSError
        A file cannot be opened or mapped.
    """

    def __init__(self, folder: str | os.PathLike) -> None:
        self.folder = Path(folder)
        description = self._description()
        self.dim: int = description["dim"]
        self.dtype: torch.dtype = DTYPES[description["dtype"]]
        self.tokens: int = description["tokens"]
        self._documents: int = description["documents"]
        self._values = self._mapped(VALUES_FILE, (self.tokens, self.dim), self.dtype)
        self._bounds = self._mapped(BOUNDS_FILE, (self._documents + 1,), torch.int64)
        first, last = self._bounds[0].item(), self._bounds[-1].item()
        if (first, last) != (0, self.tokens):
            raise ValueError(
                f"Corpus: {self.folder / BOUNDS_FILE} must go from 0 to {self.tokens}, as {DESCRIPTION_FILE} has it, "
                f"but goes from {first} to {last}; write the corpus anew with write_corpus."
            )

    def __len__(self) -> int:
        return self._documents

    def batches(
        self,
        device: str | torch.device = "cpu",
        tokens_per_batch: int = TOKENS_PER_BATCH,
        begin: int = 0,
        end: int | None = None,
    ) -> Iterator[TokenBatch]:
        """The documents in order, in batches for :func:`pylate_fastmaxsim.retrieval.search.search`.

        On a CPU a batch is a view of the memory map. For a GPU a thread reads ahead into pinned memory and copies on its
        own stream while earlier batches are scored. It holds three batches. Before it loads another, it waits until the
        GPU has finished what the caller queued for the oldest. The thread ends with the iteration, also if that is
        abandoned.

        Parameters
        ----------
        device
            Where the batches are to be.
        tokens_per_batch
            Most tokens of a batch, at least 1. A document that has more is a batch by itself. On a GPU three times as
            many are held in pinned memory; the default takes 256 MiB for each at 128 numbers of 16 bits.
        begin, end
            Documents from ``begin`` to before ``end``; all by default.

        Raises
        ------
        ValueError
            ``tokens_per_batch`` is below 1, ``begin`` and ``end`` do not fit the corpus, or its bounds are damaged.
        TypeError
            One of these is no integer.

        Notes
        -----
        Do not write to the vectors; on a CPU that ends the process. An error of the thread is raised here, in its turn. A
        batch stays valid for as long as you keep it. On a GPU, use it on the stream that was current when you took it.
        """
        device, end = torch.device(device), len(self) if end is None else end
        tokens_per_batch = require_count("Corpus.batches", "tokens_per_batch", tokens_per_batch)
        begin, end = (
            require_integer(f"Corpus.batches: {name}", value) for name, value in (("begin", begin), ("end", end))
        )
        if not 0 <= begin <= end <= len(self):
            raise ValueError(
                f"Corpus.batches: begin and end must be in order and from 0 to {len(self)}, got {begin} and {end}."
            )
        parts = self._parts(tokens_per_batch, begin, end)
        if device.type == "cuda":
            # Here, because each thread has its own current device.
            device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
            return self._streamed(device, list(parts))
        return (_batch(*self._views(part), device) for part in parts)

    def _description(self) -> dict:
        file = self.folder / DESCRIPTION_FILE
        try:
            description = json.loads(file.read_text())
        except (FileNotFoundError, NotADirectoryError):
            raise ValueError(
                f"Corpus: {self.folder} holds no complete corpus, since it has no {file.name}, which is written last; "
                "write it anew with write_corpus."
            ) from None
        except ValueError:
            description = None
        if not isinstance(description, dict) or description.get("format") != FORMAT:
            raise ValueError(f"Corpus: {file} must be of the format {FORMAT!r}, as write_corpus writes it.")
        sizes = [description.get(key) for key in ("documents", "tokens", "dim")]
        fitting = all(isinstance(size, int) and size >= 0 for size in sizes)
        if not fitting or description.get("dtype") not in [*DTYPES]:
            raise ValueError(
                f"Corpus: {file} must hold documents, tokens and dim, integers from 0, and dtype, one of "
                f"{', '.join(DTYPES)}, as write_corpus writes them."
            )
        return description

    def _mapped(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        file, count = self.folder / name, math.prod(shape)
        size = file.stat().st_size if file.exists() else 0
        if size != count * dtype.itemsize:
            raise ValueError(
                f"Corpus: {file} must have {count * dtype.itemsize} bytes, as {DESCRIPTION_FILE} has it, but has {size}."
            )
        if count == 0:  # which cannot be mapped
            return torch.empty(shape, dtype=dtype, device="cpu")
        # The mapping of torch.from_file is writable, and refused where it is larger than the memory.
        with open(file, "rb") as opened, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            return torch.frombuffer(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ), dtype=dtype).view(shape)

    def _parts(self, tokens_per_batch: int, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """First document and the one after the last of each batch."""
        while begin < end:
            # At most all tokens, so that the sum fits 64 bits.
            most = self._bounds[begin] + min(tokens_per_batch, self.tokens)
            fitting = int(torch.searchsorted(self._bounds[: end + 1], most, right=True)) - 1
            last = max(begin + 1, fitting)
            bounds = self._bounds[begin : last + 1]
            if bounds[0] < 0 or bounds[-1] > self.tokens or bool((bounds.diff() < 0).any()):
                raise ValueError(
                    f"Corpus: {self.folder / BOUNDS_FILE} must rise from 0 to {self.tokens}, but does not at the documents "
                    f"{begin} to {last}; write the corpus anew with write_corpus."
                )
            yield begin, last
            begin = last

    def _views(self, part: tuple[int, int]) -> tuple[Tensor, Tensor, int]:
        """Vectors of some documents on disk, their ``cu_seqlens``, and the length of the longest."""
        begin, end = part
        bounds = self._bounds[begin : end + 1]
        first, last = bounds[0].item(), bounds[-1].item()
        return self._values[first:last], bounds - first, int(bounds.diff().max())

    def _streamed(self, device: torch.device, parts: list[tuple[int, int]]) -> Iterator[TokenBatch]:
        if not parts:
            return
        most = max(int(self._bounds[end] - self._bounds[begin]) for begin, end in parts)
        options = {"dtype": self.dtype, "device": "cpu", "pin_memory": True}
        slots = [_Slot(torch.empty(most, self.dim, **options)) for _ in parts[:IN_FLIGHT]]
        stream = torch.cuda.Stream(device)

        def load(
            part: tuple[int, int], slot: _Slot, scored: torch.cuda.Event | None
        ) -> tuple[TokenBatch, torch.cuda.Event]:
            if scored is not None:
                slot.copied.synchronize()
                scored.synchronize()
            values, bounds, longest = self._views(part)
            staged = slot.pinned[: len(values)].copy_(values)
            with torch.cuda.device(device), torch.cuda.stream(stream):
                batch = _batch(staged, bounds.pin_memory(), longest, device)
                slot.copied = stream.record_event()
            return batch, slot.copied

        # Without waiting for what the caller queued, copies would run ahead of it and fill the device.
        for batch, copied in read_ahead(parts, slots, load, lambda: torch.cuda.current_stream(device).record_event()):
            current = torch.cuda.current_stream(device)
            current.wait_event(copied)
            for tensor in (batch.values, batch.starts, batch.lengths):
                tensor.record_stream(current)
            yield batch
            del batch


@dataclass
class _Slot:
    """A buffer in pinned memory, and the event of the last copy from it."""

    pinned: Tensor
    copied: torch.cuda.Event | None = None


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


def _batch(values: Tensor, bounds: Tensor, longest: int, device: torch.device) -> TokenBatch:
    """A batch on the device, without a copy if it is there already."""
    values, bounds = (tensor.to(device, non_blocking=True) for tensor in (values, bounds))
    return TokenBatch(values, bounds[:-1], bounds.diff(), longest, gapless=True)
