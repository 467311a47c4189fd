"""Checks of whether what a folder holds is as it was written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from pylate_fastmaxsim.files.lock import writing
from pylate_fastmaxsim.retrieval import sparse_files
from pylate_fastmaxsim.retrieval.corpus import Corpus
from pylate_fastmaxsim.retrieval.formats import description as corpus_files
from pylate_fastmaxsim.retrieval.formats.repair import repair_corpus
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
        count, damage = sparse_files.sound_blocks("check", folder, description)
        if damage and repair:
            description = sparse_files.keep_blocks(folder, description, count)
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
