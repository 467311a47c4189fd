"""An index of sparse documents that is searched exactly, in memory, on disk, on a GPU or shared among several."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from pylate_fastmaxsim._checks import require_count
from pylate_fastmaxsim.files.lock import holds_something, writing
from pylate_fastmaxsim.files.record import read_again_if_replaced
from pylate_fastmaxsim.kernels.sparse import postings
from pylate_fastmaxsim.ops.gathered import all_gather
from pylate_fastmaxsim.retrieval.ids import Id, Ids, as_ids
from pylate_fastmaxsim.retrieval.sparse import files
from pylate_fastmaxsim.retrieval.sparse.documents import Documents
from pylate_fastmaxsim.retrieval.sparse.search import require_device, search_blocks
from pylate_fastmaxsim.retrieval.sparse.shards import Shard, require_same_on_all_ranks
from pylate_fastmaxsim.retrieval.topk import merge_results
from pylate_fastmaxsim.sparse import SparseBatch, SparseVectors, as_sparse_batch, sparse_batches

Batches: TypeAlias = "SparseVectors | Iterable[SparseVectors]"


def _exclusive(method: Callable) -> Callable:
    """A method that one thread at a time calls."""

    @functools.wraps(method)
    def call(self: SparseIndex, *arguments: object, **named: object) -> object:
        with self._lock:
            return method(self, *arguments, **named)

    return call


class SparseIndex:
    """Sparse documents, to be searched exactly by inner product.

    Made by :meth:`build` or :meth:`load`. A document keeps its position, whatever is added or removed, until
    :meth:`compact`. ``len`` counts all positions, also those of removed documents. Documents may have ids, strings or
    integers, by which they are updated and removed. The scores and their order are the same bits on a CPU (SciPy) and on
    a CUDA GPU. Threads may share an index, of which one at a time searches or changes it.

    Examples
    --------
    >>> import tempfile
    >>> from pylate_fastmaxsim import SparseBatch, SparseIndex
    >>> documents = SparseBatch.from_lists([[(0, 2.0)], [(1, 1.0)], [(0, 1.0), (2, 4.0)]], vocabulary=3)
    >>> queries = SparseBatch.from_lists([[(0, 1.0), (2, 0.5)]], vocabulary=3)
    >>> index = SparseIndex.build(documents)
    >>> index
    SparseIndex(3 documents, vocabulary 3, float32, on cpu)
    >>> index.search(queries, k=2)
    (tensor([[3., 2.]]), tensor([[2, 0]]))
    >>> index.add([documents])
    >>> index.remove([2])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     index.save(folder)
    ...     SparseIndex.load(folder).search(queries, k=4)
    (tensor([[3., 2., 2., 0.]]), tensor([[ 5,  0,  3, -1]]))
    >>> index = SparseIndex.build(documents, ids=["a", "b", "c"])
    >>> index.update(documents.select(torch.tensor([1])), ids="a")
    >>> scores, positions = index.search(queries, k=2)
    >>> positions, index.ids_of(positions), index.ids
    (tensor([[ 2, -1]]), [['c']], ['b', 'c', 'a'])
    """

    def __init__(self, documents: Documents, shard: Shard | None = None) -> None:
        """Use :meth:`build` or :meth:`load`."""
        self.vocabulary, self.dtype, self.device = documents.vocabulary, documents.dtype, documents.device
        self._documents, self._shard = documents, shard
        self._lock = threading.RLock()

    @classmethod
    def build(
        cls,
        batches: Batches | Callable[[int], Batches],
        *,
        folder: str | os.PathLike | None = None,
        device: str | torch.device | None = None,
        ids: Iterable[Id] | None = None,
    ) -> SparseIndex:
        """Make an index of documents, which may come in batches.

        With a ``folder`` the collection need not fit in memory: each block of 16,384 documents is written as soon as it is
        full, and read through a memory map. A build that is interrupted loses at most the documents after its last full
        block. The same call goes on with it if ``batches`` is a function. So does a later call that has more documents.

        Parameters
        ----------
        batches
            Documents over one vocabulary, on any device: the tensor that ``encode`` of a SparseEncoder returns, or any
            other form that :func:`pylate_fastmaxsim.sparse_search` takes; or batches of these, which may come from a
            generator. Or a function that returns them, called with the number of documents that the folder holds already: it begins with the document
            of this number. float16 weights are kept as such; behind float32 ones they become float32.
        folder
            Where to keep the index; ``None``: in memory. Empty, yet to be made, or with ``batches`` a function, the folder
            of an earlier build.
        device
            Where to search, a CPU or a CUDA GPU. By default the CPU with a folder, and the device of the first batch
            without.
        ids
            A string or an integer for each document, all different, also of those that the folder holds already; by
            default documents have positions only.

        Raises
        ------
        ValueError
            There is no batch, vocabularies differ, float32 weights follow float16 ones, ``folder`` holds something and
            ``batches`` is no function, a file of an earlier build is damaged, or another process writes the folder. Ids
            are given twice, are not as many as documents, or not those of the documents that the folder holds.
        TypeError
            Something in ``batches`` is no batch, or an id is of another type.
        OSError
            Writing fails, as on a full disk.

        Examples
        --------
        >>> import tempfile
        >>> from pylate_fastmaxsim import SparseBatch, SparseIndex
        >>> documents = SparseBatch.from_lists([[(0, 2.0)], [(1, 1.0)], [(0, 1.0)]], vocabulary=2)
        >>> def batches(held):
        ...     return [documents.select(torch.arange(held, len(documents)))]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     len(SparseIndex.build(batches, folder=folder))
        3
        """
        where, folder = "SparseIndex.build", None if folder is None else Path(folder)
        device = None if device is None else _device(where, device)
        ids = None if ids is None else as_ids(where, ids)
        with nullcontext() if folder is None else writing(where, folder):
            documents, held = None, 0
            if folder is not None:
                device = device or torch.device("cpu")
                if (begun := files.read_unfinished(where, folder)) is not None:
                    documents = Documents.read(where, folder, device, begun, range(len(begun.blocks)))
                    held = len(documents)
                if not callable(batches) and holds_something(folder):
                    raise ValueError(
                        f"{where}: {folder} must be empty, unless batches is a function of the number of documents that it "
                        f"holds ({held}), which goes on with them."
                    )
            batches = sparse_batches(where, "batches", batches(held) if callable(batches) else batches)
            if documents is None:
                first = next(batches, None)
                if first is None:
                    raise ValueError(f"{where}: there must be at least one batch, which says what the vocabulary is.")
                device, new_ids = device or _device(where, first.device), None if ids is None else Ids()
                documents = Documents(first.vocabulary, first.dtype, device, files.Stored(folder), new_ids)
                batches = chain([first], batches)
            if ids is not None:
                known = documents.require_ids(where).all
                if ids[: len(known)] != known:
                    raise ValueError(f"{where}: ids must begin with those of the {len(known)} documents in {folder}.")
                ids = ids[len(known) :]
            documents.append(where, batches, folder is not None, documents.new_ids(where, ids))
            if folder is not None:
                documents.describe(documents.stored)
            return cls(documents)

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike,
        device: str | torch.device = "cpu",
        shard: tuple[int, int] | None = None,
    ) -> SparseIndex:
        """Open an index that :meth:`save` or :meth:`build` has written.

        All is read once, to compare it with its checksums. On a CPU the files are mapped into memory. If a file is
        truncated while it is mapped, reading ends the process (SIGBUS) without a Python error.

        Parameters
        ----------
        folder
            Where the index is.
        device
            Where to search, a CPU or a CUDA GPU.
        shard
            This rank and the number of ranks R. Holds one of R about equal parts of the index. :meth:`search` then is a
            call that all ranks of the default process group make together, with equal arguments, and each gets the
            results of the whole. Such an index cannot be changed or saved.

        Raises
        ------
        ValueError
            The folder holds no complete index, a file is missing, truncated or damaged, or ``shard`` is out of range.
        """
        where, folder, device = "SparseIndex.load", Path(folder), _device("SparseIndex.load", device)
        if shard is not None:
            rank, ranks = shard
            if not 0 <= rank < ranks:
                raise ValueError(f"{where}: shard must be a rank from 0 and a larger number of ranks, got {shard}.")

        def opened() -> SparseIndex:
            description = files.read_description(where, folder)
            blocks, of_shard = range(len(description.blocks)), None
            if shard is not None:
                blocks = blocks[len(blocks) * rank // ranks : len(blocks) * (rank + 1) // ranks]
                of_shard = Shard(rank, ranks, blocks.start * postings.DOCUMENTS_PER_BLOCK, description.documents)
            return cls(Documents.read(where, folder, device, description, blocks), of_shard)

        return read_again_if_replaced(folder / files.DESCRIPTION_FILE, opened)

    def __len__(self) -> int:
        return len(self._documents) if self._shard is None else self._shard.documents

    def __repr__(self) -> str:
        removed = len(self._documents.removed())
        documents = f"{len(self)} documents{f', of which {removed} are removed' if removed else ''}"
        shard = f", shard {self._shard.rank} of {self._shard.ranks}" if self._shard else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"SparseIndex({documents}, vocabulary {self.vocabulary}, {dtype}, on {self.device}{shard})"

    @property
    def nbytes(self) -> int:
        """Bytes of the documents that this process holds, mapped ones too, with their postings (a CPU has them after two searches)."""
        return self._documents.searched.nbytes

    def live_positions(self) -> Tensor:
        """Positions of the documents that are not removed, ascending, int64, on the CPU.

        Raises
        ------
        ValueError
            The index is a shard, which knows only its own.
        """
        self._require_unsharded("SparseIndex.live_positions", "knows only its own documents")
        return self._documents.live_positions()

    @property
    def ids(self) -> list[Id] | None:
        """Ids of the documents that are not removed, in the order of :meth:`live_positions`; None of an index without ids.

        Raises
        ------
        ValueError
            The index is a shard, which knows only its own.
        """
        self._require_unsharded("SparseIndex.ids", "knows only its own documents")
        ids = self._documents.ids
        return None if ids is None else [*ids.positions]

    def ids_of(self, positions: Tensor) -> list[list[Id]]:
        """Ids of the documents that :meth:`search` has found.

        Parameters
        ----------
        positions
            ``[Nq, k]``, int64, found since the index was made, loaded or compacted.

        Returns
        -------
        list of lists
            For each query its ids, best first, as many as it found: none for a position of -1.

        Raises
        ------
        ValueError
            Documents have no ids, or the index is a shard, which knows only its own.
        """
        self._require_unsharded("SparseIndex.ids_of", "knows only its own documents")
        ids = self._documents.require_ids("SparseIndex.ids_of").all
        return [[ids[each] for each in row if each >= 0] for row in positions.tolist()]

    @_exclusive
    def add(self, batches: Batches, ids: Id | Iterable[Id] | None = None) -> None:
        """Add documents behind the last one, in any form that :meth:`build` takes.

        Changes the index in memory; :meth:`save` writes the blocks that are new or have grown. More documents than fit in
        memory are added by :meth:`build`, with a function.

        Parameters
        ----------
        batches
            Documents over the vocabulary of the index.
        ids
            An id for each document, of none that the index holds; of an index without ids, ``None``.

        Raises
        ------
        ValueError
            A batch differs from the index in vocabulary, its weights are float32 and those of the index float16, ids are
            given twice, are in the index or are not as many as documents, or the index is a shard. Then none is added.
        TypeError
            Something in ``batches`` is no batch, or an id is of another type.
        """
        self._require_unsharded("SparseIndex.add")
        new = self._documents.new_ids("SparseIndex.add", ids)
        self._documents.append("SparseIndex.add", sparse_batches("SparseIndex.add", "batches", batches), False, new)

    @_exclusive
    def update(self, batches: Batches, ids: Id | Iterable[Id]) -> None:
        """Replace documents, and add those that are new: as :meth:`add`, but ids may be in the index.

        A document that is replaced gets a position behind the last, as a new one does.
        """
        where = "SparseIndex.update"
        self._require_unsharded(where)
        held, new = self._documents.require_ids(where).positions, as_ids(where, ids)
        replaced = torch.tensor([held[each] for each in new if each in held], dtype=torch.int64, device="cpu")
        self._documents.append(where, sparse_batches(where, "batches", batches), False, new)
        self._documents.remove(where, replaced)

    @_exclusive
    def remove(self, positions: Iterable[int] | Tensor | None = None, ids: Id | Iterable[Id] | None = None) -> None:
        """Remove documents: no search returns them any more. All others keep their positions.

        Their memory is freed by :meth:`compact`.

        Parameters
        ----------
        positions
            Integers, in any order: a list, or an int64 tensor.
        ids
            Ids of the documents, in place of positions.

        Raises
        ------
        ValueError
            A position or an id is not in the index, is removed already or occurs twice, or the index is a shard. Then
            none is removed.
        TypeError
            Positions are no integers; a mask is ``mask.nonzero().flatten()``. Or both or neither are given.
        """
        where = "SparseIndex.remove"
        self._require_unsharded(where)
        positions, counts = self._documents.positions(where, positions, ids).unique(return_counts=True)
        if bool((counts > 1).any()):
            raise ValueError(f"{where}: position {positions[counts > 1][0]} is given twice.")
        self._documents.remove(where, positions)
        if (held := self._documents.ids) is not None:
            for each in positions.tolist():
                del held.positions[held.all[each]]

    @_exclusive
    def vectors(
        self, positions: Iterable[int] | Tensor | None = None, ids: Id | Iterable[Id] | None = None
    ) -> SparseBatch:
        """A copy of the vectors of documents, as they are scored, in the order of their positions or ids.

        ValueError if one is not in the index or is removed, or the index is a shard; TypeError as of :meth:`remove`.

        Examples
        --------
        >>> from pylate_fastmaxsim import SparseBatch, SparseIndex
        >>> index = SparseIndex.build(SparseBatch.from_lists([[(0, 2.0)], [(1, 1.0)]], vocabulary=2), ids=["a", "b"])
        >>> index.vectors(ids="b").weights, index.vectors(index.live_positions()).weights
        (tensor([1.]), tensor([2., 1.]))
        """
        self._require_unsharded("SparseIndex.vectors", "knows only its own documents")
        positions = self._documents.positions("SparseIndex.vectors", positions, ids)
        none = SparseBatch.from_torch(torch.empty(0, self.vocabulary, dtype=self.dtype, device=self.device))
        return self._documents.select("SparseIndex.vectors", positions) if len(positions) else none

    @_exclusive
    def compact(self) -> Tensor:
        """Free the memory of removed documents, and on disk with the next :meth:`save`. Nothing is encoded again.

        The other documents move up, so that their positions change; their ids do not. Takes memory for a copy of all
        blocks from the first with a removed document on. A later :meth:`build` with a function goes on behind as many
        documents as are left, which with ``ids`` is refused where these are others.

        Returns
        -------
        Tensor
            Position that each document had before, ascending, int64 ``[len(index)]``, on the CPU.

        Raises
        ------
        ValueError
            The index is a shard.

        Examples
        --------
        >>> from pylate_fastmaxsim import SparseBatch, SparseIndex
        >>> index = SparseIndex.build(SparseBatch.from_lists([[(0, 2.0)], [(1, 1.0)]], vocabulary=2))
        >>> index.remove([0])
        >>> index.compact(), index
        (tensor([1]), SparseIndex(1 documents, vocabulary 2, float32, on cpu))
        """
        self._require_unsharded("SparseIndex.compact")
        positions = self._documents.live_positions()
        self._documents = self._documents.compacted()
        return positions

    @_exclusive
    @torch.no_grad()
    def search(self, queries: SparseVectors, k: int) -> tuple[Tensor, Tensor]:
        """The ``k`` documents of each query with the largest inner product.

        Parameters
        ----------
        queries
            Nq queries over the vocabulary of the index, on its device, in any form that
            :func:`pylate_fastmaxsim.sparse_search` takes.
        k
            Number of documents to return for each query, at least 1.

        Returns
        -------
        scores
            Inner products, best first, ``[Nq, min(k, Nd)]`` for Nd documents, float32: sums in float64, rounded once. 0
            where fewer documents share a term with the query.
        positions
            Which document each score is of, ``[Nq, min(k, Nd)]``, int64; -1 where there is none. Of equal scores the
            lower position comes first.

        Raises
        ------
        ValueError
            ``k`` is below 1, or queries differ from the index in vocabulary or device. Of a shard also: the process group
            is another than the index was loaded for, or ranks differ in ``queries`` or ``k``.
        TypeError
            ``k`` is no integer, or ``queries`` are none.
        """
        where = "SparseIndex.search"
        queries, k = as_sparse_batch(where, "queries", queries), min(require_count(where, "k", k), len(self))
        if queries.vocabulary != self.vocabulary:
            raise ValueError(
                f"{where}: queries must have the vocabulary {self.vocabulary} of the index, got {queries.vocabulary}."
            )
        if queries.device != self.device:
            raise ValueError(
                f"{where}: queries must be on {self.device}, as the index is, got {queries.device}; move one of them "
                "with .to."
            )
        if self._shard is None:
            return search_blocks(self._documents.searched, queries, k)
        require_same_on_all_ranks(where, self._shard, queries, k, self._documents.stored.state)
        found = search_blocks(self._documents.searched, queries, k, self._shard.first)
        # Ranks hold documents in their order.
        return found if self._shard.ranks == 1 else merge_results([*zip(*map(all_gather, found), strict=True)], k)

    @_exclusive
    def save(self, folder: str | os.PathLike) -> None:
        """Write the index to a folder: each block of documents to a file, and ``index.json`` last.

        In the folder that the index was loaded from, built in or saved in, only new and grown blocks are written. If that
        is interrupted, the folder holds the index of before.

        Raises
        ------
        ValueError
            The folder holds something else, has been written by others since this index was loaded or saved, or is being
            written, or the index is a shard.
        OSError
            Writing fails, as on a full disk.
        """
        where, folder = "SparseIndex.save", Path(folder)
        self._require_unsharded(where)
        with writing(where, folder):
            self._documents.save(where, folder)

    @_exclusive
    def to(self, device: str | torch.device) -> SparseIndex:
        """The index on another device, a CPU or a CUDA GPU; itself if it is there."""
        device = _device("SparseIndex.to", device)
        return self if device == self.device else SparseIndex(self._documents.to(device), self._shard)

    def __getstate__(self) -> dict:
        with self._lock:
            return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state, _lock=threading.RLock())

    def _require_unsharded(self, where: str, what: str = "cannot be changed or saved") -> None:
        if self._shard is not None:
            raise ValueError(f"{where}: an index that was loaded as a shard {what}; load it whole.")


def _device(where: str, device: str | torch.device) -> torch.device:
    """Device as tensors have it; ValueError if it cannot search."""
    require_device(where, torch.device(device))
    return torch.empty(0, device=device).device
