"""Cut a damaged corpus back to the documents before the damage."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch

from pylate_fastmaxsim.files.lock import writing
from pylate_fastmaxsim.retrieval.formats import description
from pylate_fastmaxsim.retrieval.formats.part import Part, mapped_part
from pylate_fastmaxsim.retrieval.formats.ranks import folders


def repair_corpus(folder: str | os.PathLike) -> int:
    """Cut a corpus back to the last document before which all is sound. Returns how many documents it has now.

    ``write_corpus`` goes on from there with a function as ``batches``. No other process may have the corpus open. Of a
    corpus of several ranks, those before the last must be sound: without some of their documents, those of later ranks
    would be at other positions.

    ValueError if there is no complete corpus, its description, checksums or codec is damaged, a rank before the last is,
    or no document is sound.
    """
    *others, last = folders(Path(folder))
    for each in others:
        mapped_part(each, description.read(each)).verify()
    with writing("repair_corpus", last):
        held = description.read(last)
        for name, size in held.sizes.items():
            with (last / name).open("ab") as file:
                if file.tell() < size:  # zeros, which are damage like any other
                    file.truncate(size)
        part = mapped_part(last, held)
        kept = _sound_documents(part)
        if kept == 0 and len(part):
            raise ValueError(f"repair_corpus: {last} has no sound document; write the corpus again with write_corpus.")
        if kept < len(part):
            tokens = int(part.bounds[kept])
            rows = {name: kept if column.per_document else tokens for name, column in held.format.columns.items()} | {
                "bounds": kept + 1
            }
            checksums = np.concatenate([part.checked[name].checksums_of(count) for name, count in rows.items()])
            description.finish(last, held._replace(documents=kept, tokens=tokens, checksums=checksums))
    return kept + sum(description.read(each).documents for each in others)


def _sound_documents(part: Part) -> int:
    kept = max(0, part.checked["bounds"].sound_rows() - 1)
    for name, column in part.format.columns.items():
        rows = part.checked[name].sound_rows()
        if not column.per_document:
            rows = int(torch.searchsorted(part.bounds[: kept + 1], rows, right=True)) - 1
        kept = min(kept, rows)
    return kept
