"""``corpus.json``, which says what the files of a corpus hold, and the journal of one that is not finished."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import NamedTuple

from pylate_fastmaxsim.files.replace import replace_file
from pylate_fastmaxsim.retrieval.formats.format import DTYPES, Format, Plain, described, format_from

# Written last, so that a folder with this file is complete.
DESCRIPTION_FILE = "corpus.json"
# The same of what is written so far. Renamed to the description at the end.
JOURNAL_FILE = "unfinished.json"
PLAIN = "pylate-fastmaxsim corpus 1"
COMPRESSED = "pylate-fastmaxsim corpus 2"  # which releases before it refuse


class Held(NamedTuple):
    """What a folder holds."""

    format: Format
    documents: int
    tokens: int


def read(file: Path) -> Held | None:
    """What a description or journal says; None if there is no such file. ValueError if it is damaged."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:
        values = None
    if not isinstance(values, dict) or values.get("format") not in (PLAIN, COMPRESSED):
        raise ValueError(
            f"Corpus: {file} must be of the format {PLAIN!r} or {COMPRESSED!r}, as write_corpus writes it."
        )
    sizes = [values.get(key) for key in ("documents", "tokens", "dim")]
    if not all(isinstance(size, int) and size >= 0 for size in sizes) or not _names_a_format(values):
        is_plain = values["format"] == PLAIN
        stored = f"dtype, one of {', '.join(DTYPES)}" if is_plain else "how documents are stored"
        raise ValueError(
            f"Corpus: {file} must hold documents, tokens and dim, integers from 0, and {stored}, as write_corpus writes "
            "them."
        )
    return Held(format_from(file.parent, values), *sizes[:2])


def _names_a_format(values: dict) -> bool:
    if values["format"] == PLAIN:
        return values.get("dtype") in [*DTYPES]
    scale, stored = values.get("scale"), values.get("stored")
    if stored == "fp8":
        return isinstance(scale, float) and scale > 0 and math.frexp(scale)[0] == 0.5  # a power of two
    return stored == "int8" or (stored == "residual" and isinstance(values.get("codec"), str))


def write(file: Path, held: Held) -> None:
    name = PLAIN if isinstance(held.format, Plain) else COMPRESSED
    values = {"format": name, "documents": held.documents, "tokens": held.tokens, **described(held.format)}
    replace_file(file, (json.dumps(values) + "\n").encode())
