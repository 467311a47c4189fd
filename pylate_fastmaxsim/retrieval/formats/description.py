"""``corpus.json``, which says what the files of a corpus hold, and the journal of a call that has not ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pylate_fastmaxsim.files.record import checksum, read_record, write_record
from pylate_fastmaxsim.files.replace import replace_file
from pylate_fastmaxsim.retrieval.formats.checksums import WRITE_AGAIN, chunks
from pylate_fastmaxsim.retrieval.formats.format import Format, format_from

# Written last, so that a folder with this file is complete.
DESCRIPTION_FILE = "corpus.json"
# The same of what an unfinished call has written so far. It is there before anything else, and removed last.
JOURNAL_FILE = "unfinished.json"
BOUNDS_FILE = "bounds.bin"  # [N + 1], int64, where documents begin and end, as cu_seqlens
FORMAT = "pylate-fastmaxsim corpus 3"

_CHECKSUMS = "checksums-{}.bin"


class Held(NamedTuple):
    """Contents of a folder."""

    format: Format
    documents: int
    tokens: int
    checksums: np.ndarray  # of the chunks of all data files, in the order of `sizes`, uint64
    generation: int  # of the description, in a journal of that which the call goes on from; 0 if there is none
    identity: str  # made at random with the first description

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each data file."""
        columns = self.format.columns.items()
        sizes = {file_of(name): column.nbytes(self.documents, self.tokens) for name, column in columns}
        return sizes | {BOUNDS_FILE: 8 * (self.documents + 1)}

    @property
    def checksums_by_file(self) -> dict[str, np.ndarray]:
        """Checksums of the chunks of each data file."""
        ends = np.cumsum([chunks(size) for size in self.sizes.values()])
        return dict(zip(self.sizes, np.split(self.checksums, ends[:-1]), strict=True))


def file_of(column: str) -> str:
    """File of a column: its rows one after another, without a header."""
    return f"{column}.bin"


def read(folder: Path) -> Held | None:
    """Read the description of a folder; None if it has none. ValueError if it, or a file that it needs, is damaged."""
    values = _values(folder / DESCRIPTION_FILE, WRITE_AGAIN)
    return None if values is None else _held(folder, values)


def read_unfinished(folder: Path) -> Held | None:
    """Read what a call that has not ended has written, else the corpus; None if there are no documents."""
    complete = read(folder)
    journal = _values(folder / JOURNAL_FILE, "remove it, which loses what an unfinished call has written")
    # While it counts nothing, there may be no codec yet.
    if journal is not None and journal["documents"]:
        before = complete.generation if complete else 0
        # A corpus that was finished since needs its journal no more.
        if journal["generation"] == before and (complete is None or journal["identity"] == complete.identity):
            return _held(folder, journal)
    return complete


def begin(folder: Path) -> None:
    """Write the journal of a call that has written nothing yet."""
    write_record(folder / JOURNAL_FILE, {"format": FORMAT, "documents": 0})


def note(folder: Path, held: Held) -> None:
    """Write the journal of what is on the disk."""
    _write(folder / JOURNAL_FILE, held)
    _remove_unnamed(folder)


def finish(folder: Path, held: Held) -> None:
    """Make what is on the disk a corpus: the next generation of what ``held`` goes on from."""
    _write(folder / DESCRIPTION_FILE, held._replace(generation=held.generation + 1))
    (folder / JOURNAL_FILE).unlink(missing_ok=True)
    _remove_unnamed(folder)


def _write(file: Path, held: Held) -> None:
    table = held.checksums.tobytes()
    # With the checksum, so that no reader finds new content under an old name.
    name = _CHECKSUMS.format(checksum(table))
    replace_file(file.with_name(name), table)
    values = {
        "format": FORMAT,
        "identity": held.identity,
        "generation": held.generation,
        "documents": held.documents,
        "tokens": held.tokens,
        "checksums": name,
    }
    write_record(file, values | held.format.described())


def _values(file: Path, what_to_do: str) -> dict[str, Any] | None:
    try:
        values = read_record(file)
    except ValueError:
        raise ValueError(f"Corpus: {file} is damaged, or of another release; {what_to_do}.") from None
    if values is not None and values.get("format") != FORMAT:
        raise ValueError(f"Corpus: {file} must be of the format {FORMAT!r}, as write_corpus writes it.")
    return values


def _held(folder: Path, values: dict[str, Any]) -> Held:
    file = folder / values["checksums"]
    try:
        table = file.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"Corpus: {file} is missing; {WRITE_AGAIN}.") from None
    if file.name != _CHECKSUMS.format(checksum(table)):
        raise ValueError(f"Corpus: {file} is damaged; {WRITE_AGAIN}.")
    return Held(
        format_from(folder, values),
        values["documents"],
        values["tokens"],
        np.frombuffer(table, np.uint64),
        values["generation"],
        values["identity"],
    )


def _remove_unnamed(folder: Path) -> None:
    """Remove checksums that neither the description nor the journal names."""
    found = [read_record(folder / name) or {} for name in (DESCRIPTION_FILE, JOURNAL_FILE)]
    for file in folder.glob(_CHECKSUMS.format("*")):
        if file.name not in [values.get("checksums") for values in found]:
            file.unlink()
