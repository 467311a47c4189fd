"""What tells files from others of the same names."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path


def content_digest(files: Iterable[str | Path]) -> str:
    """Of the content of files, one after the other; read in parts, because models and data are large."""
    digest = hashlib.sha256()
    for file in files:
        with open(file, "rb") as content:
            while block := content.read(2**24):
                digest.update(block)
    return digest.hexdigest()
