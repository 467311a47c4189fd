"""Write the documents of an index or a corpus for another system."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from pylate_fastmaxsim.export.parquet import to_parquet
from pylate_fastmaxsim.export.qdrant import to_qdrant
from pylate_fastmaxsim.export.source import Dense, Sparse, source_of
from pylate_fastmaxsim.retrieval.plaid_writer import TOKENS_PER_BATCH, codec_of, writing_plaid

# `begin(task, total, done)` of a bar returns what is told how many more are done.
Begin = Callable[[str, int, int], Callable[[int], object]]


def to_plaid(source: Dense | Sparse, at: str) -> Iterator[int]:
    """Write an index of PLAID, and yield after each chunk how many documents there are; first, how many there were."""
    if isinstance(source, Sparse):
        raise ValueError("export: an index of PLAID holds token embeddings, but these are sparse vectors.")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batches = partial(source.batches, tokens=TOKENS_PER_BATCH, device=device)
    codec = partial(codec_of, source.corpus, source.positions, device)
    return writing_plaid("export", Path(at), ["plaid", *source.state], batches, codec, source.ids)


TARGETS: dict[str, Callable[[Dense | Sparse, str], Iterator[int]]] = {
    "parquet": to_parquet,
    "plaid": to_plaid,
    "qdrant": to_qdrant,
}


def export(folder: str | os.PathLike, to: str, at: str | os.PathLike, begin: Begin | None = None) -> int:
    """Write all documents that a folder holds, with their ids, for another system. A call that was killed goes on.

    Memory is bounded, whatever the folder holds. Documents of an index that are removed are left out.

    Parameters
    ----------
    folder
        That of a :class:`pylate_fastmaxsim.SparseIndex`, of :func:`pylate_fastmaxsim.retrieval.corpus.write_corpus`, of
        :class:`pylate_fastmaxsim.indexes.Exact`, or of ``fastmaxsim search --index``. It must not be changed meanwhile.
    to
        ``"parquet"``: files with the columns ``id``, and ``vectors`` (lists of lists of d numbers, float32 from a corpus of
        float32, else float16) or ``indices`` and ``values`` (of sparse vectors, int32 and float32). ``"plaid"``: an index of
        token embeddings, as :func:`pylate_fastmaxsim.write_plaid` writes it. ``"qdrant"``: points of a collection, which is
        made, with ``vectors``, multivectors that MaxSim scores or sparse vectors, and ``id`` in the payload.
    at
        A folder: empty, yet to be made, or that of an earlier call, which is gone on with. That of PLAID is
        ``index_folder/index_name`` of PyLate. For Qdrant ``URL/COLLECTION``, with the key of a server in the environment, as
        ``QDRANT_API_KEY``, or without a server ``FOLDER/COLLECTION``, as for ``QdrantClient(path=FOLDER)``.
    begin
        Makes a progress bar of a title, a total and a number that is done, and returns what is told of more.

    Returns
    -------
    int
        Number of documents, all of which are there.

    Raises
    ------
    ValueError
        ``folder`` holds no documents, or is damaged, or none that fit the target; or there is something else at ``at``, or
        documents of a folder that has changed since.
    ImportError
        A library is not installed.
    OSError
        Writing fails, as on a full disk. A ConnectionError: the server does not answer.

    Examples
    --------
    >>> import tempfile, torch
    >>> from pyarrow.parquet import read_table
    >>> from pylate_fastmaxsim.export.run import export
    >>> from pylate_fastmaxsim.indexes import Exact
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     index = Exact(folder, "docs", device="cpu").add_documents(["a", "b"], [torch.eye(2), torch.ones(1, 2)])
    ...     export(f"{folder}/docs", "parquet", f"{folder}/parquet")
    ...     read_table(f"{folder}/parquet").to_pylist()
    2
    [{'id': 'a', 'vectors': [[1.0, 0.0], [0.0, 1.0]]}, {'id': 'b', 'vectors': [[1.0, 1.0]]}]
    """
    if to not in TARGETS:
        raise ValueError(f"export: to must be one of {', '.join(TARGETS)}, got {to!r}.")
    source = source_of(Path(folder))
    counts = TARGETS[to](source, os.fspath(at))
    done = next(counts)
    update = begin("export", len(source), done) if begin else lambda more: None
    for count in counts:
        update(count - done)
        done = count
    return done
