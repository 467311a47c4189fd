"""Write documents to the files of a corpus, with a journal of how much of them is good."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from pathlib import Path

import torch
from torch import Tensor

from pylate_fastmaxsim.cpu.live_tokens import live_tokens
from pylate_fastmaxsim.files.replace import replace_file
from pylate_fastmaxsim.retrieval.checks import require_batches
from pylate_fastmaxsim.retrieval.folders import holds_something
from pylate_fastmaxsim.retrieval.formats import description
from pylate_fastmaxsim.retrieval.formats.description import DESCRIPTION_FILE, JOURNAL_FILE, Held
from pylate_fastmaxsim.retrieval.formats.format import CODEC_FILE, Chosen, ResidualDocuments, format_of, require_chosen
from pylate_fastmaxsim.tokens import TokenBatch

BOUNDS_FILE = "bounds.bin"  # [N + 1], int64, where documents begin and end, as cu_seqlens

# What a call that is killed at its very beginning may leave.
_LEFT_OVER = (CODEC_FILE,)

# What a killed process loses at most.
SECONDS_BETWEEN_NOTES = 30.0


def file_of(column: str) -> str:
    """Where a column is: its rows one after another, without a header."""
    return f"{column}.bin"


class Writer:
    """The files of a folder, open for appending.

    What the journal does not count is cut off. A finished corpus that is added to stays as it was until the end.
    """

    def __init__(self, folder: Path, held: Held, files: ExitStack) -> None:
        self.folder = folder
        self.format, self.documents, self.tokens = held
        if not held.documents:
            remove(folder)
            if isinstance(self.format, ResidualDocuments):
                replace_file(folder / CODEC_FILE, self.format.codec.to_bytes())
        # Before anything is written, so that whatever is there has a journal.
        description.write(folder / JOURNAL_FILE, held)
        self._files = {}
        sizes = {
            file_of(name): column.nbytes(held.documents, held.tokens) for name, column in self.format.columns.items()
        }
        for name, size in (sizes | {BOUNDS_FILE: 8 * (held.documents + 1)}).items():
            self._files[name] = files.enter_context((folder / name).open("r+b" if held.documents else "xb"))
            found = os.fstat(self._files[name].fileno()).st_size
            if held.documents and found < size:
                raise ValueError(
                    f"write_corpus: {folder / name} must have at least {size} bytes, as {JOURNAL_FILE} has it, but has "
                    f"{found}; remove {folder} and write the corpus anew."
                )
            self._files[name].truncate(size if held.documents else 0)
            self._files[name].seek(0, os.SEEK_END)
        if not held.documents:
            self._write(BOUNDS_FILE, torch.zeros(1, dtype=torch.int64, device="cpu"))
        self._noted = time.monotonic()

    def append(self, batch: TokenBatch) -> None:
        """Write a batch whose documents lie back to back, all of their tokens live."""
        for name, array in self.format.encode(batch).items():
            self._write(file_of(name), array.cpu())
        self._write(BOUNDS_FILE, self.tokens + batch.lengths.cumsum(0).cpu())
        # Together, as an interruption may come in between.
        self.documents, self.tokens = self.documents + len(batch), self.tokens + len(batch.values)
        if time.monotonic() - self._noted >= SECONDS_BETWEEN_NOTES:
            self.note()

    def note(self) -> None:
        """Write the journal, once what it counts is on the disk."""
        for file in self._files.values():
            file.flush()
            # A power cut must not leave a journal of data that was never written.
            os.fsync(file.fileno())
        description.write(self.folder / JOURNAL_FILE, Held(self.format, self.documents, self.tokens))
        self._noted = time.monotonic()

    def finish(self) -> None:
        """Make it a corpus."""
        self.note()
        os.replace(self.folder / JOURNAL_FILE, self.folder / DESCRIPTION_FILE)

    def _write(self, name: str, tensor: Tensor) -> None:
        # The error of numpy's tofile does not say that the disk is full.
        self._files[name].write(tensor.contiguous().view(torch.uint8).flatten().numpy().data)


def write(folder: Path, batches: Iterable[TokenBatch] | Callable[[int], Iterable[TokenBatch]], chosen: Chosen) -> None:
    """Write batches behind the documents that a folder holds, where they are a function, else into an empty folder."""
    held = description.read(folder / JOURNAL_FILE) or description.read(folder / DESCRIPTION_FILE)
    goes_on = callable(batches)
    if not goes_on or held is None:
        _require_empty(folder, held)
    elif held.documents:
        require_chosen(f"{folder} holds {held.documents} documents", held.format, chosen)
    else:
        held = None  # so that it may become of another format
    if goes_on:
        batches = batches(held.documents if held else 0)
        require_batches("write_corpus", "batches", batches)
    writer = None
    with ExitStack() as files:
        try:
            for batch in map(_live, batches):
                stored = writer or held or Held(format_of(chosen, batch), 0, 0)
                if batch.dim != stored.format.dim:
                    raise ValueError(
                        "write_corpus: all batches must have the same d, also that of a codec and of documents in the "
                        f"folder, got {stored.format.dim} and {batch.dim}."
                    )
                writer = writer or Writer(folder, stored, files)
                writer.append(batch)
            if writer is None and held is None:
                raise ValueError("write_corpus: there must be at least one batch, which says what d is.")
            if writer is None and (folder / JOURNAL_FILE).exists():
                writer = Writer(folder, held, files)
            if writer is not None:
                writer.finish()
        except BaseException as error:
            if writer is not None and isinstance(error, (TypeError, ValueError)) and not (goes_on and writer.documents):
                # So that the folder is empty for the corrected call.
                remove(folder)
            elif writer is not None:
                with suppress(OSError):  # as on a full disk; then the journal of before holds
                    writer.note()
            raise


def _live(batch: object) -> TokenBatch:
    """The tokens of a batch that count, back to back."""
    if not isinstance(batch, TokenBatch):
        raise TypeError(f"write_corpus: each of batches must be a TokenBatch, got {type(batch).__name__}.")
    live = live_tokens(batch.starts, batch.lengths, batch.keep)
    return TokenBatch(batch.values.detach()[live.row], live.first, live.count, batch.max_length, gapless=True)


def _require_empty(folder: Path, held: Held | None) -> None:
    if held is None and not holds_something(folder, _LEFT_OVER):
        return
    on = "" if held is None else f", or go on with its {held.documents} documents, with a function as batches"
    raise ValueError(f"write_corpus: {folder} must be empty; choose another folder, or remove what it holds{on}.")


def remove(folder: Path) -> None:
    """Remove what a :class:`Writer` writes."""
    columns = ("values", "scales", "codes", "packed")
    for name in (*map(file_of, columns), BOUNDS_FILE, CODEC_FILE, DESCRIPTION_FILE, JOURNAL_FILE):
        (folder / name).unlink(missing_ok=True)
