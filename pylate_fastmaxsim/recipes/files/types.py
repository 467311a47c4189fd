"""Types of files that hold rows, by their endings."""

from __future__ import annotations

from pathlib import Path

# The names that datasets has for them.
_KINDS = {".jsonl": "json", ".parquet": "parquet", ".json": "json", ".csv": "csv", ".tsv": "csv"}
FILE_TYPES = _KINDS | {f"{ending}.gz": kind for ending, kind in _KINDS.items() if kind != "parquet"}

ENDINGS = ".parquet, .jsonl, .json, .csv or .tsv (these four also with .gz)"


def file_type(file: str | Path) -> str | None:
    """The ending of a file that holds rows, a key of FILE_TYPES; None for other files.

    Examples
    --------
    >>> from pylate_fastmaxsim.recipes.files.types import file_type
    >>> file_type("rows.v2.jsonl.gz"), file_type("rows.txt")
    ('.jsonl.gz', None)
    """
    return next((ending for ending in FILE_TYPES if str(file).endswith(ending)), None)
