"""``corpus.json``, which says what the files of a folder hold, the journal of a call, and the folders of several ranks."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pylate_fastmaxsim._checks import require_integer
from pylate_fastmaxsim.files.record import checksum, read_record, write_record
from pylate_fastmaxsim.files.replace import replace_file
from pylate_fastmaxsim.retrieval.formats.checksums import WRITE_AGAIN, chunks
from pylate_fastmaxsim.retrieval.formats.format import BOUNDS, Column, Format, format_from

# Written last, so that a folder with this file is complete.
DESCRIPTION_FILE = "corpus.json"
# The same of what an unfinished call has written so far. It is there before anything else, and removed last.
JOURNAL_FILE = "unfinished.json"
FORMAT = "pylate-fastmaxsim corpus 3"

_CHECKSUMS = "checksums-{}.bin"
_RANK = re.compile(r"rank-(\d{5})-of-(\d{5})")


class Held(NamedTuple):
    """Contents of a folder."""

    format: Format
    documents: int
    tokens: int
    checksums: np.ndarray  # of the chunks of all data files, in the order of `columns`, uint64
    generation: int  # of the description, in a journal of that which the call goes on from; 0 if there is none
    identity: str  # made at random with the first description
    ids: int | None = None  # bytes of the file of ids, of an index; None: documents have none
    removed: Sequence[int] = ()  # positions of documents of an index that it does not return, ascending

    @property
    def columns(self) -> dict[str, Column]:
        return self.format.columns | {"bounds": BOUNDS}

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each column's file, and of that of ids."""
        columns = {name: column.nbytes(self.documents, self.tokens) for name, column in self.columns.items()}
        return columns if self.ids is None else columns | {"ids": self.ids}

    @property
    def checksums_by_column(self) -> dict[str, np.ndarray]:
        ends = np.cumsum([chunks(size) for size in self.sizes.values()])
        return dict(zip(self.sizes, np.split(self.checksums, ends[:-1]), strict=True))


def file_of(column: str) -> str:
    """File of a column: its rows one after another, without a header. That of ids: each in JSON, on a line."""
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


def note(folder: Path, held: Held) -> None:
    """Write the journal of what is on the disk."""
    _write(folder / JOURNAL_FILE, held)
    _remove_unnamed(folder)


def finish(folder: Path, held: Held) -> Held:
    """Make what is on the disk a corpus: the next generation of what ``held`` goes on from, which is returned."""
    finished = held._replace(generation=held.generation + 1)
    _write(folder / DESCRIPTION_FILE, finished)
    (folder / JOURNAL_FILE).unlink(missing_ok=True)
    _remove_unnamed(folder)
    return finished


def rank_folder(folder: Path, rank: object) -> Path:
    """Folder of the process ``rank`` = (r, n) of a call of write_corpus."""
    try:
        number, ranks = (require_integer("rank", value) for value in rank)
    except (TypeError, ValueError):
        raise TypeError(f"write_corpus: rank must be a pair of integers (r, n), got {rank!r}.") from None
    if not 0 <= number < ranks:
        raise ValueError(f"write_corpus: rank (r, n) must have r from 0 to n - 1, got {(number, ranks)}.")
    found = _ranks(folder)
    if (folder / DESCRIPTION_FILE).exists() or (folder / JOURNAL_FILE).exists() or found not in (0, ranks):
        what = f"a corpus of {found} ranks" if found else "a corpus of one process"
        raise ValueError(
            f"write_corpus: {folder} holds {what}, to which rank {(number, ranks)} cannot add; choose another."
        )
    return _of_rank(folder, number, ranks)


def folders(folder: Path) -> list[Path]:
    """The folder of a corpus, or those of its ranks in order. ValueError if one has no corpus."""
    if (folder / DESCRIPTION_FILE).exists():
        return [folder]
    ranks = _ranks(folder)
    if not ranks:
        raise ValueError(
            f"Corpus: {folder} holds no complete corpus, since it has no {DESCRIPTION_FILE}, which is written last; write it "
            "anew with write_corpus, or go on with what an interrupted call has written, with a function as batches."
        )
    found = [_of_rank(folder, number, ranks) for number in range(ranks)]
    for number, inside in enumerate(found):
        if not (inside / DESCRIPTION_FILE).exists():
            raise ValueError(
                f"Corpus: {folder} lacks the documents of rank {number} of {ranks}: {inside.name} has no {DESCRIPTION_FILE}, "
                f"which is written last; call write_corpus with rank=({number}, {ranks})."
            )
    return found


def _of_rank(folder: Path, number: int, ranks: int) -> Path:
    return folder / f"rank-{number:05}-of-{ranks:05}"


def _ranks(folder: Path) -> int:
    """Number of processes that write a folder; 0 if it is not of several. ValueError if that is not clear."""
    names = [_RANK.fullmatch(path.name) for path in folder.glob("rank-*-of-*")]
    found = {int(name[2]) for name in names if name}
    if len(found) > 1:
        raise ValueError(
            f"Corpus: {folder} holds folders of ranks of {sorted(found)} processes; remove those that are old."
        )
    return max(found, default=0)


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
    if held.ids is not None:
        values |= {"ids": held.ids, "removed": [*held.removed]}
    write_record(file, values | held.format.described())


def _values(file: Path, what_to_do: str) -> dict[str, Any] | None:
    try:
        return read_record(file, FORMAT)
    except ValueError:
        raise ValueError(f"Corpus: {file} is damaged, or of another release; {what_to_do}.") from None


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
        values.get("ids"),
        values.get("removed", ()),
    )


def _remove_unnamed(folder: Path) -> None:
    """Remove checksums that neither the description nor the journal names."""
    named = [(read_record(folder / name) or {}).get("checksums") for name in (DESCRIPTION_FILE, JOURNAL_FILE)]
    for file in folder.glob(_CHECKSUMS.format("*")):
        if file.name not in named:
            file.unlink()
