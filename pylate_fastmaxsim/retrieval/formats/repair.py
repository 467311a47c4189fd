"""Cut a damaged corpus back to the documents before the damage."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch

from pylate_fastmaxsim.retrieval.folders import writing
from pylate_fastmaxsim.retrieval.formats import description
from pylate_fastmaxsim.retrieval.formats.part import Part, mapped_part
from pylate_fastmaxsim.retrieval.formats.ranks import folders


def repair_corpus(folder: str | os.PathLike) -> int:
    """Cut a corpus back to the last document before which all is sound. Returns how many documents it has now.

    ``write_corpus`` goes on from there with a function as ``batches``. No other process may have the corpus open. Of a
    corpus of several ranks, those before the last must be sound: without some of their documents, those of later ranks
    would be at other positions.

    Raises
    ------
    ValueError
        There is no complete corpus, its description, checksums or codec is damaged, a rank before the last is, or no
        document is sound.
    OSError
        Writing fails.

    Examples
    --------
    >>> import tempfile, torch
    >>> from pathlib import Path
    >>> from pylate_fastmaxsim import TokenBatch
    >>> from pylate_fastmaxsim.retrieval.corpus import Corpus, write_corpus
    >>> from pylate_fastmaxsim.retrieval.formats.repair import repair_corpus
    >>> documents = TokenBatch.from_list([torch.randn(300, 64) for _ in range(4)])  # of 37.5 KiB each
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     corpus = write_corpus(folder, [documents])
    ...     with open(Path(folder, "values.bin"), "r+b") as file:
    ...         _ = file.seek(140_000), file.write(b"damaged")  # in the third chunk of 64 KiB
    ...     repair_corpus(folder), len(Corpus(folder))
    (3, 3)
    """
    *others, last = folders(Path(folder))
    for each in others:
        mapped_part(each, description.read(each)).verify()
    with writing("repair_corpus", last):
        held = description.read(last)
        for name, size in description.sizes(*held[:3]).items():
            with (last / name).open("ab") as file:
                if file.tell() < size:  # zeros, which are damage like any other
                    file.truncate(size)
        part = mapped_part(last, held)
        kept = _sound_documents(part)
        if kept == 0 and len(part):
            raise ValueError(f"repair_corpus: {last} has no sound document; write the corpus again with write_corpus.")
        if kept < len(part):
            tokens = int(part.bounds[kept])
            checksums = [
                part.checked[name].checksums_of(kept if column.per_document else tokens)
                for name, column in held.format.columns.items()
            ]
            checksums = np.concatenate([*checksums, part.checked_bounds.checksums_of(kept + 1)])
            description.finish(last, held._replace(documents=kept, tokens=tokens, checksums=checksums))
    return kept + sum(description.read(each).documents for each in others)


def _sound_documents(part: Part) -> int:
    kept = max(0, part.checked_bounds.sound_rows() - 1)
    for name, column in part.format.columns.items():
        rows = part.checked[name].sound_rows()
        if not column.per_document:
            rows = int(torch.searchsorted(part.bounds[: kept + 1], rows, right=True)) - 1
        kept = min(kept, rows)
    return kept
