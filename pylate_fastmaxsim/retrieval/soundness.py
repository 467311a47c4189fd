"""Checks of whether what a folder holds is as it was written."""

import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from pylate_fastmaxsim.files.lock import writing
from pylate_fastmaxsim.retrieval.corpus import Corpus
from pylate_fastmaxsim.retrieval.formats import description as corpus_files
from pylate_fastmaxsim.retrieval.formats.part import Part, mapped_part
from pylate_fastmaxsim.retrieval.sparse import files as sparse_files
from pylate_fastmaxsim.retrieval.static import files as static_files
from pylate_fastmaxsim.retrieval.static.model import StaticLateInteraction


@dataclass(frozen=True)
class Checked:
    """Contents of a folder, and whether they are sound.

    Parameters
    ----------
    folder
        The folder.
    what
        A sparse index, token embeddings, a static model, or what a call that has not ended has written of these.
    documents
        Their number; None for a model, or if that is damaged.
    damage
        A sentence that names a damaged file; None if all is as it was written.
    repaired
        Whether what is damaged was cut off.
    """

    folder: Path
    what: str
    documents: int | None
    damage: str | None = None
    repaired: bool = False


def check_folder(folder: str | os.PathLike, *, repair: bool = False) -> list[Checked]:
    """Read all that this package has written in a folder and in the folders in it, and compare it with its checksums.

    Parameters
    ----------
    folder
        A folder of :meth:`pylate_fastmaxsim.SparseIndex.save`, :func:`pylate_fastmaxsim.retrieval.corpus.write_corpus` or
        :meth:`pylate_fastmaxsim.StaticLateInteraction.save`, or one that holds some, as that of ``fastmaxsim search --index``.
    repair
        Cut damaged documents and all behind them off. What has written them goes on from there. A model is not repaired.

    Returns
    -------
    list of Checked
        One for each thing that is found; after a repair, with the documents that are left and what was damaged.

    Raises
    ------
    ValueError
        The folder holds nothing of this package, or another process writes it while it is to be repaired.
    OSError
        A file cannot be read or written.

    Examples
    --------
    >>> import tempfile
    >>> from pylate_fastmaxsim import SparseBatch, SparseIndex
    >>> from pylate_fastmaxsim.retrieval.soundness import check_folder
    >>> documents = SparseBatch.from_lists([[(0, 2.0)], [(1, 1.0)]], vocabulary=2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = SparseIndex.build([documents], folder=folder)
    ...     [found] = check_folder(folder)
    >>> found.what, found.documents, found.damage
    ('a sparse index', 2, None)
    """
    if not os.path.isdir(folder):
        raise ValueError(f"check: there is no folder {folder}.")
    found = list(_found(Path(folder), repair))
    if not found:
        raise ValueError(f"check: {folder} holds no sparse index, token embeddings or static model of this package.")
    return found


def _found(folder: Path, repair: bool) -> Iterator[Checked]:
    if (folder / sparse_files.DESCRIPTION_FILE).exists():
        yield _sparse(folder, repair)
    elif (folder / corpus_files.DESCRIPTION_FILE).exists() or any(folder.glob("rank-*-of-*")):
        yield _corpus(folder, repair)
    elif (folder / static_files.DESCRIPTION_FILE).exists():
        yield _static(folder)
    elif (folder / sparse_files.UNFINISHED_FILE).exists():  # of either
        yield Checked(folder, "what a call has begun to write, and the same call goes on with", None)
    else:
        for inside in sorted(path for path in folder.iterdir() if path.is_dir()):
            yield from _found(inside, repair)


def _sparse(folder: Path, repair: bool) -> Checked:
    what = "a sparse index"
    with writing("check", folder) if repair else nullcontext():
        try:
            description = sparse_files.read_description("check", folder)
        except ValueError as error:
            return Checked(folder, what, None, _sentence(error))
        sound, damage = sparse_files.sound_part("check", folder, description)
        if damage and repair:
            description = sound
            sparse_files.write_description(folder, sound)
    return Checked(folder, what, description.documents, damage and _sentence(damage), repair and damage is not None)


def _corpus(folder: Path, repair: bool) -> Checked:
    what, documents = "token embeddings", None
    try:
        corpus = Corpus(folder)
        what, documents = f"token embeddings ({corpus.format})", len(corpus)
        corpus.verify()
    except ValueError as error:
        if repair:
            documents = repair_corpus(folder)
        return Checked(folder, what, documents, _sentence(error), repair)
    return Checked(folder, what, documents)


def _static(folder: Path) -> Checked:
    try:
        StaticLateInteraction.load(folder)
    except ValueError as error:
        return Checked(folder, "a static model", None, _sentence(error))
    return Checked(folder, "a static model", None)


def _sentence(error: object) -> str:
    """Text of an error behind the name of the function."""
    return str(error).partition(": ")[2]


def repair_corpus(folder: str | os.PathLike) -> int:
    """Cut a corpus back to the last document before which all is sound. Returns how many documents it has now.

    ``write_corpus`` goes on from there with a function as ``batches``. No other process may have the corpus open. Of a
    corpus of several ranks, those before the last must be sound: without some of their documents, those of later ranks
    would be at other positions.

    ValueError if there is no complete corpus, its description, checksums or codec is damaged, a rank before the last is,
    or no document is sound.
    """
    *others, last = corpus_files.folders(Path(folder))
    for each in others:
        mapped_part(each, corpus_files.read(each)).verify()
    with writing("repair_corpus", last):
        held = corpus_files.read(last)
        for name, size in held.sizes.items():
            with (last / corpus_files.file_of(name)).open("ab") as file:
                if file.tell() < size:  # zeros, which are damage like any other
                    file.truncate(size)
        part = mapped_part(last, held)
        kept = _sound_documents(part)
        if kept == 0 and len(part):
            raise ValueError(f"repair_corpus: {last} has no sound document; write the corpus again with write_corpus.")
        if kept < len(part):
            tokens = int(part.bounds[kept])
            columns = held.columns.items()
            checksums = [part.checked[name].checksums_of(column.rows(kept, tokens)) for name, column in columns]
            if part.ids is not None:
                ids = _ends_of_ids(part)[kept - 1].item() + 1
                checksums.append(part.checked["ids"].checksums_of(ids))
                held = held._replace(ids=ids, removed=[each for each in held.removed if each < kept])
            held = held._replace(documents=kept, tokens=tokens, checksums=np.concatenate(checksums))
            corpus_files.finish(last, held)
    return kept + sum(corpus_files.read(each).documents for each in others)


def _sound_documents(part: Part) -> int:
    kept = max(0, part.checked["bounds"].sound_rows() - 1)
    for name, column in part.format.columns.items():
        rows = part.checked[name].sound_rows()
        if not column.per_document:
            rows = int(torch.searchsorted(part.bounds[: kept + 1], rows, right=True)) - 1
        kept = min(kept, rows)
    if part.ids is not None:
        kept = min(kept, int((_ends_of_ids(part) < part.checked["ids"].sound_rows()).sum()))
    return kept


def _ends_of_ids(part: Part) -> torch.Tensor:
    return (part.ids == ord("\n")).nonzero().flatten()
