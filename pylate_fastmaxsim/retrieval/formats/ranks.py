"""The folders of a corpus that several processes write, and what a corpus consists of."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from pylate_fastmaxsim._checks import require_integer
from pylate_fastmaxsim.files.record import read_again_if_replaced
from pylate_fastmaxsim.retrieval.formats import description
from pylate_fastmaxsim.retrieval.formats.description import DESCRIPTION_FILE, JOURNAL_FILE
from pylate_fastmaxsim.retrieval.formats.part import Part, mapped_part

_FOLDER = re.compile(r"rank-(\d{5})-of-(\d{5})")


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


def open_parts(folder: Path) -> list[Part]:
    """The documents of a folder, of all ranks if it is of several. ValueError if they are not complete."""
    if (part := _opened(folder)) is not None:
        return [part]
    parts: list[Part] = []
    for part in map(_opened, folders(folder)):
        first = parts[0].format if parts else part.format
        if part.format.codec and first.codec and part.format.codec.checksum == first.codec.checksum:
            part = dataclasses.replace(part, format=first)  # so that a device holds it once
        parts.append(part)
    return parts


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


def _opened(folder: Path) -> Part | None:
    """The corpus of a folder; None if it has none."""

    def opened() -> Part | None:
        if (held := description.read(folder)) is None:
            return None
        part = mapped_part(folder, held)
        part.require_end(held.tokens)
        return part

    return read_again_if_replaced(folder / DESCRIPTION_FILE, opened)


def _of_rank(folder: Path, number: int, ranks: int) -> Path:
    return folder / f"rank-{number:05}-of-{ranks:05}"


def _ranks(folder: Path) -> int:
    """Number of processes that write a folder; 0 if it is not of several. ValueError if that is not clear."""
    names = [_FOLDER.fullmatch(path.name) for path in folder.glob("rank-*-of-*")]
    found = {int(name[2]) for name in names if name}
    if len(found) > 1:
        raise ValueError(
            f"Corpus: {folder} holds folders of ranks of {sorted(found)} processes; remove those that are old."
        )
    return max(found, default=0)
