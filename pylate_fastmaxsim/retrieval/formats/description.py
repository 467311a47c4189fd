"""``corpus.json``, which says what the files of a corpus hold, and the journal of a call that has not ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pylate_fastmaxsim.files.record import checksum, read_record, write_record
from pylate_fastmaxsim.files.replace import replace_file
from pylate_fastmaxsim.retrieval.formats.format import Format, described, format_from

# Written last, so that a folder with this file is complete.
DESCRIPTION_FILE = "corpus.json"
# The same of what an unfinished call has written so far. It is there before anything else, and removed last.
JOURNAL_FILE = "unfinished.json"
BOUNDS_FILE = "bounds.bin"  # [N + 1], int64, where documents begin and end, as cu_seqlens
FORMAT = "pylate-fastmaxsim corpus 3"

WRITE_AGAIN = "put it back, or write the corpus again with write_corpus"
_CHECKSUMS = "checksums-{}.bin"


class Held(NamedTuple):
    """What a folder holds.

    Parameters
    ----------
    checksums
        Of the chunks of all data files, in the order of :func:`sizes`, uint64.
    generation
        Number of the description, or in a journal that of the description that the call goes on from; 0 if there is none.
    identity
        Made at random with the first description.
    """

    format: Format
    documents: int
    tokens: int
    checksums: np.ndarray
    generation: int
    identity: str


def file_of(column: str) -> str:
    """Where a column is: its rows one after another, without a header."""
    return f"{column}.bin"


def sizes(format: Format, documents: int, tokens: int) -> dict[str, int]:
    """Bytes of each data file."""
    columns = {file_of(name): column.nbytes(documents, tokens) for name, column in format.columns.items()}
    return columns | {BOUNDS_FILE: 8 * (documents + 1)}


def read(folder: Path) -> Held | None:
    """What the description of a folder says; None if it has none. ValueError if it, or a file that it needs, is damaged."""
    values = _values(folder / DESCRIPTION_FILE, WRITE_AGAIN)
    return None if values is None else _held(folder, values)


def read_unfinished(folder: Path) -> Held | None:
    """What a call goes on from: what one that has not ended has written, else the corpus; None if there are no documents."""
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
    write_record(file, values | described(held.format))


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
