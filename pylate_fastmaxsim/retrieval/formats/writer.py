"""Write documents to the files of a corpus, with a journal of how much of them is good."""

import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pylate_fastmaxsim.cpu.live_tokens import live_tokens
from pylate_fastmaxsim.files.lock import holds_something
from pylate_fastmaxsim.files.record import write_record
from pylate_fastmaxsim.files.replace import remove_file, sync
from pylate_fastmaxsim.retrieval.formats import description
from pylate_fastmaxsim.retrieval.formats.checksums import AppendedFile
from pylate_fastmaxsim.retrieval.formats.description import DESCRIPTION_FILE, FORMAT, JOURNAL_FILE, Held, file_of
from pylate_fastmaxsim.retrieval.formats.format import CODEC_FILE, Chosen, format_of, require_chosen
from pylate_fastmaxsim.tokens import TokenBatch, token_batches

# What a killed process loses at most.
SECONDS_BETWEEN_NOTES = 30.0


class Writer:
    """The files of a folder, open for appending.

    What the journal or else the description does not count is cut off. A finished corpus that is added to stays as it was
    until the end: no byte that it counts is written again. What came from a GPU is written by a thread, while it makes more.
    """

    def __init__(self, folder: Path, held: Held, files: ExitStack) -> None:
        self.folder, self.held = folder, held
        is_new = not held.documents and not held.generation
        if is_new:
            clear(folder)
            if held.format.codec is not None:
                held.format.codec.save(folder / CODEC_FILE)
        checksums = held.checksums_by_column
        self._files = {
            name: AppendedFile(folder / file_of(name), None if is_new else size, checksums[name], files)
            for name, size in held.sizes.items()
        }
        if is_new:
            self._write("bounds", torch.zeros(1, dtype=torch.int64, device="cpu"))
        self._noted = time.monotonic()
        self._thread = files.enter_context(ThreadPoolExecutor(1))  # which ends before the files are closed
        self._coming: Future[None] | None = None

    def append(self, batch: TokenBatch, ids: bytes = b"") -> None:
        """Write a batch as :func:`live` makes it, of an index with the lines of its ids.

        An error may be raised by the next call.
        """
        arrays = {name: array.cpu() for name, array in self.held.format.encode(batch).items()}
        ends = batch.lengths.cumsum(0).cpu()
        self.wait()
        if batch.device.type == "cpu":  # where the arrays may be the caller's own
            self._append(arrays, ends, len(batch.values), ids)
        else:
            self._coming = self._thread.submit(self._append, arrays, ends, len(batch.values), ids)

    def finish(self, removed: Sequence[int] = ()) -> Held:
        """Make it a corpus, or an index without the documents that are ``removed``."""
        self.wait()
        return description.finish(self.folder, self._synced()._replace(removed=removed))

    def wait(self) -> None:
        """Return once the last batch is written, or raise what went wrong."""
        if self._coming is None:
            return
        error = self._coming.exception()  # where an interrupt leaves it to be waited for again
        self._coming = None
        if error is not None:
            raise error

    def _append(self, arrays: dict[str, Tensor], ends: Tensor, tokens: int, ids: bytes) -> None:
        held = self.held
        if ids:
            self._files["ids"].append(memoryview(ids))
            held = held._replace(ids=held.ids + len(ids))
        for name, array in (arrays | {"bounds": held.tokens + ends}).items():
            self._write(name, array)
        self.held = held._replace(documents=held.documents + len(ends), tokens=held.tokens + tokens)
        if time.monotonic() - self._noted >= SECONDS_BETWEEN_NOTES:
            self.note()

    def note(self) -> None:
        """Write the journal, once what it counts is on the disk."""
        description.note(self.folder, self._synced())
        self._noted = time.monotonic()

    def _synced(self) -> Held:
        checksums = [self._files[name].synced(size) for name, size in self.held.sizes.items()]
        return self.held._replace(checksums=np.concatenate(checksums))

    def _write(self, name: str, tensor: Tensor) -> None:
        self._files[name].append(tensor.contiguous().view(torch.uint8).flatten().numpy().data)


def write(
    folder: Path,
    batches: Iterable[TokenBatch] | Callable[[int], Iterable[TokenBatch]],
    chosen: Chosen,
    others_follow: bool = False,
) -> None:
    """Write batches behind the documents that a folder holds, where they are a function, else into an empty folder.

    ``others_follow``: once it is finished, documents of other folders follow those of this one.
    """
    held = description.read_unfinished(folder)
    if held is not None and held.ids is not None:
        raise ValueError(
            f"write_corpus: {folder} is an index; add documents to it with pylate_fastmaxsim.indexes.Exact."
        )
    goes_on, is_corpus = callable(batches), held is not None and held.generation > 0
    if not goes_on or held is None:
        _require_empty(folder, held)
    else:
        require_chosen(f"write_corpus: {folder} holds {held.documents} documents", held.format, chosen)
    if goes_on:
        batches = token_batches("write_corpus", "batches", batches(held.documents if held else 0))
    writer = None
    with ExitStack() as files:
        try:
            for batch in map(live, batches):
                stored = held or Held(format_of(chosen, batch), 0, 0, np.zeros(0, np.uint64), 0, secrets.token_hex(8))
                if batch.dim != stored.format.dim:
                    raise ValueError(
                        "write_corpus: all batches must have the same d, also that of a codec and of documents in the "
                        f"folder, got {stored.format.dim} and {batch.dim}."
                    )
                if held is not None and not len(batch):
                    continue
                if is_corpus and others_follow:
                    raise ValueError(
                        f"write_corpus: {folder} is finished with {held.documents} documents, and more would move those of "
                        "the ranks behind it to other positions; give them to the last rank, or write another corpus."
                    )
                held, writer = stored, writer or Writer(folder, stored, files)
                writer.append(batch)
            if held is None:
                raise ValueError("write_corpus: there must be at least one batch, which says what d is.")
            if writer is None and (folder / JOURNAL_FILE).exists():
                writer = Writer(folder, held, files)
            if writer is not None:
                writer.finish()
        except BaseException as error:
            if writer is not None:
                with suppress(OSError):  # as on a full disk; then the journal of before holds
                    writer.wait()
                    is_refused = isinstance(error, (TypeError, ValueError)) and not (goes_on and writer.held.documents)
                    if is_refused and not is_corpus:
                        # So that the folder is empty for the corrected call.
                        clear(folder)
                        sync(folder)
                        (folder / JOURNAL_FILE).unlink()
                    else:
                        writer.note()
            raise


def live(batch: TokenBatch) -> TokenBatch:
    """The tokens of a batch that count, back to back; its own where they are so."""
    if batch.gapless and batch.keep is None and torch.equal(batch.starts, batch.lengths.cumsum(0) - batch.lengths):
        return batch.with_values(batch.values.detach())
    found = live_tokens(batch.starts, batch.lengths, batch.keep)
    return TokenBatch(batch.values.detach()[found.row], found.first, found.count, batch.max_length, gapless=True)


def _require_empty(folder: Path, held: Held | None) -> None:
    if held is None and ((folder / JOURNAL_FILE).exists() or not holds_something(folder)):
        return
    on = "" if held is None else f", or go on with its {held.documents} documents, with a function as batches"
    raise ValueError(f"write_corpus: {folder} must be empty; choose another folder, or remove what it holds{on}.")


def clear(folder: Path) -> None:
    """Remove all documents of a folder, which from the first step on do not count. A journal stays, which says so."""
    write_record(folder / JOURNAL_FILE, {"format": FORMAT, "documents": 0})
    remove_file(folder / DESCRIPTION_FILE)
    columns = map(file_of, ("values", "scales", "codes", "packed", "bounds", "ids"))
    checksums = (file.name for file in folder.glob("checksums-*.bin"))
    for name in (*columns, CODEC_FILE, *checksums):
        (folder / name).unlink(missing_ok=True)
