"""The folders of a corpus that several processes write, and what a corpus consists of."""

from __future__ import annotations

import re
from pathlib import Path

from pylate_fastmaxsim._checks import require_integer
from pylate_fastmaxsim.retrieval.formats import description
from pylate_fastmaxsim.retrieval.formats.description import DESCRIPTION_FILE, JOURNAL_FILE
from pylate_fastmaxsim.retrieval.formats.format import Format, ResidualDocuments, digest
from pylate_fastmaxsim.retrieval.formats.part import Part, mapped_part

_FOLDER = re.compile(r"rank-(\d{5})-of-(\d{5})")


def rank_folder(folder: Path, rank: object) -> Path:
    """Where the process ``rank`` = (r, n) of a call of write_corpus writes."""
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
    if (held := description.read(folder / DESCRIPTION_FILE)) is not None:
        return [mapped_part(folder, held)]
    ranks = _ranks(folder)
    if not ranks:
        raise ValueError(
            f"Corpus: {folder} holds no complete corpus, since it has no {DESCRIPTION_FILE}, which is written last; write it "
            "anew with write_corpus, or go on with what an interrupted call has written, with a function as batches."
        )
    parts: list[Part] = []
    for number in range(ranks):
        inside = _of_rank(folder, number, ranks)
        if (held := description.read(inside / DESCRIPTION_FILE)) is None:
            raise ValueError(
                f"Corpus: {folder} lacks the documents of rank {number} of {ranks}: {inside.name} has no {DESCRIPTION_FILE}, "
                f"which is written last; call write_corpus with rank=({number}, {ranks})."
            )
        if parts and _have_one_codec(held.format, parts[0].format):
            held = held._replace(format=parts[0].format)  # so that a device holds it once
        parts.append(mapped_part(inside, held))
    return parts


def _of_rank(folder: Path, number: int, ranks: int) -> Path:
    return folder / f"rank-{number:05}-of-{ranks:05}"


def _ranks(folder: Path) -> int:
    """How many processes write a folder; 0 if it is not of several. ValueError if that is not clear."""
    names = [_FOLDER.fullmatch(path.name) for path in folder.glob("rank-*-of-*")]
    found = {int(name[2]) for name in names if name}
    if len(found) > 1:
        raise ValueError(
            f"Corpus: {folder} holds folders of ranks of {sorted(found)} processes; remove those that are old."
        )
    return max(found, default=0)


def _have_one_codec(*formats: Format) -> bool:
    residual = [format for format in formats if isinstance(format, ResidualDocuments)]
    return len(residual) == len(formats) and len({digest(format.codec) for format in residual}) == 1
