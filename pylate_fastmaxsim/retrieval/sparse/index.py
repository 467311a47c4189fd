"""An index of sparse documents that is searched exactly, in memory, on disk, on a GPU or shared among several."""

from __future__ import annotations

import functools
import os
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from pylate_fastmaxsim._checks import require_count, require_positions
from pylate_fastmaxsim.files.lock import holds_something, writing
from pylate_fastmaxsim.files.record import read_again_if_replaced
from pylate_fastmaxsim.kernels.sparse import postings
from pylate_fastmaxsim.ops.gathered import all_gather
from pylate_fastmaxsim.retrieval.ids import Id, Ids, as_ids, from_lines
from pylate_fastmaxsim.retrieval.sparse import files
from pylate_fastmaxsim.retrieval.sparse.blocks import Blocks, all_live
from pylate_fastmaxsim.retrieval.sparse.search import in_blocks, require_device, require_fitting, search_blocks
from pylate_fastmaxsim.retrieval.sparse.shards import require_same_on_all_ranks
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

    def __init__(self, vocabulary: int, dtype: torch.dtype, device: torch.device) -> None:
        """Use :meth:`build` or :meth:`load`."""
        self.vocabulary, self.dtype, self.device = vocabulary, dtype, device
        self._blocks = Blocks(vocabulary, device)
        self._ids: Ids | None = None  # None: documents have none
        self._stored = files.Stored()
        self._lock = threading.RLock()
        # This rank and the number of ranks, the number of this rank's first block, and of the documents of all ranks.
        self._shard: tuple[int, int] | None = None
        self._first_block, self._documents_of_all = 0, 0

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
            index, held = None, 0
            if folder is not None:
                device = device or torch.device("cpu")
                if (begun := files.read_unfinished(where, folder)) is not None:
                    index = cls._opened(where, folder, device, begun, range(len(begun.blocks)))
                    held = len(index)
                if not callable(batches) and holds_something(folder):
                    raise ValueError(
                        f"{where}: {folder} must be empty, unless batches is a function of the number of documents that it "
                        f"holds ({held}), which goes on with them."
                    )
            batches = sparse_batches(where, "batches", batches(held) if callable(batches) else batches)
            if index is None:
                first = next(batches, None)
                if first is None:
                    raise ValueError(f"{where}: there must be at least one batch, which says what the vocabulary is.")
                index = cls(first.vocabulary, first.dtype, device or _device(where, first.device))
                index._stored.folder, index._ids = folder, None if ids is None else Ids()
                batches = chain([first], batches)
            if ids is not None:
                known = index._with_ids(where).all
                if ids[: len(known)] != known:
                    raise ValueError(f"{where}: ids must begin with those of the {len(known)} documents in {folder}.")
                ids = ids[len(known) :]
            index._append(where, batches, folder is not None, index._new_ids(where, ids))
            if folder is not None:
                index._describe(index._stored)
            return index

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
            blocks = range(len(description.blocks))
            if shard is not None:
                blocks = blocks[len(blocks) * rank // ranks : len(blocks) * (rank + 1) // ranks]
            return cls._opened(where, folder, device, description, blocks)

        index = read_again_if_replaced(folder / files.DESCRIPTION_FILE, opened)
        index._shard = shard
        return index

    @classmethod
    def _opened(
        cls, where: str, folder: Path, device: torch.device, description: files.Description, blocks: range
    ) -> SparseIndex:
        index = cls(description.vocabulary, description.dtype, device)
        index._stored, index._first_block = files.Stored(folder, state=description.state), blocks.start
        index._documents_of_all = description.documents
        names: list[Id] = []
        has_ids = description.has_ids and len(blocks) == len(description.blocks)  # a shard does without
        for number in blocks:
            line = description.blocks[number]
            block, ids = files.read_block(where, folder, number, line, description.vocabulary)
            names += from_lines(ids) if has_ids else []
            first = number * postings.DOCUMENTS_PER_BLOCK
            begin, end = (bisect_left(description.removed, first + each) for each in (0, line.documents))
            live = None
            if begin < end:
                gone = torch.tensor(description.removed[begin:end], device=device) - first
                live = all_live(line.documents, device).index_fill_(0, gone, False)
            index._stored.written[len(index._blocks.all)] = line
            index._blocks.set(len(index._blocks.all), block.to(device), live)
        if has_ids:
            index._ids = Ids(names, {*description.removed})
        return index

    def __len__(self) -> int:
        return len(self._blocks) if self._shard is None else self._documents_of_all

    def __repr__(self) -> str:
        removed = len(self._blocks.removed())
        documents = f"{len(self)} documents{f', of which {removed} are removed' if removed else ''}"
        shard = f", shard {self._shard[0]} of {self._shard[1]}" if self._shard else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"SparseIndex({documents}, vocabulary {self.vocabulary}, {dtype}, on {self.device}{shard})"

    @property
    def nbytes(self) -> int:
        """Bytes of the documents that this process holds, mapped ones too, with their postings (a CPU has them after two searches)."""
        return self._blocks.searched.nbytes

    def live_positions(self) -> Tensor:
        """Positions of the documents that are not removed, ascending, int64, on the CPU.

        Raises
        ------
        ValueError
            The index is a shard, which knows only its own.
        """
        self._require_unsharded("SparseIndex.live_positions", "knows only its own documents")
        return self._blocks.live_positions()

    @property
    def ids(self) -> list[Id] | None:
        """Ids of the documents that are not removed, in the order of :meth:`live_positions`; None of an index without ids.

        Raises
        ------
        ValueError
            The index is a shard, which knows only its own.
        """
        self._require_unsharded("SparseIndex.ids", "knows only its own documents")
        return None if self._ids is None else [*self._ids.positions]

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
        ids = self._with_ids("SparseIndex.ids_of").all
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
        new = self._new_ids("SparseIndex.add", ids)
        self._append("SparseIndex.add", sparse_batches("SparseIndex.add", "batches", batches), False, new)

    @_exclusive
    def update(self, batches: Batches, ids: Id | Iterable[Id]) -> None:
        """Replace documents, and add those that are new: as :meth:`add`, but ids may be in the index.

        A document that is replaced gets a position behind the last, as a new one does.
        """
        where = "SparseIndex.update"
        self._require_unsharded(where)
        held, new = self._with_ids(where).positions, as_ids(where, ids)
        replaced = torch.tensor([held[each] for each in new if each in held], dtype=torch.int64, device="cpu")
        self._append(where, sparse_batches(where, "batches", batches), False, new)
        self._blocks.remove(where, replaced)

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
        positions, counts = self._positions(where, positions, ids).unique(return_counts=True)
        if bool((counts > 1).any()):
            raise ValueError(f"{where}: position {positions[counts > 1][0]} is given twice.")
        self._blocks.remove(where, positions)
        for each in positions.tolist() if self._ids is not None else ():
            del self._ids.positions[self._ids.all[each]]

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
        positions = self._positions("SparseIndex.vectors", positions, ids)
        none = SparseBatch.from_torch(torch.empty(0, self.vocabulary, dtype=self.dtype, device=self.device))
        return self._blocks.select("SparseIndex.vectors", positions) if len(positions) else none

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
        positions = self._blocks.live_positions()
        self._blocks, kept = self._blocks.compacted()
        self._stored.keep_first(kept)
        if self._ids is not None:
            self._ids = Ids(self._ids.positions)
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
        if self._shard is not None:
            identity, written = self._stored.state
            generation = (written, int(identity, 16) >> 1)
            require_same_on_all_ranks(where, self._shard, queries, k, generation)
        first = self._first_block * postings.DOCUMENTS_PER_BLOCK
        found = search_blocks(self._blocks.searched, queries, k, first)
        if self._shard is None or self._shard[1] == 1:
            return found
        # Ranks hold documents in their order.
        return merge_results([*zip(*map(all_gather, found), strict=True)], k)

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
            stored = self._stored.to_save(where, folder)
            for number, block in enumerate(self._blocks.all):
                if not stored.has(number, block):
                    stored.write(number, block, self._ids_of_block(number))
            self._describe(stored)
            self._stored = stored

    @_exclusive
    def to(self, device: str | torch.device) -> SparseIndex:
        """The index on another device, a CPU or a CUDA GPU; itself if it is there."""
        device = _device("SparseIndex.to", device)
        if device == self.device:
            return self
        index = SparseIndex(self.vocabulary, self.dtype, device)
        for name in ("_shard", "_first_block", "_documents_of_all"):
            setattr(index, name, getattr(self, name))
        index._stored = replace(self._stored, written=dict(self._stored.written))
        for number, (block, live) in enumerate(zip(self._blocks.all, self._blocks.live, strict=True)):
            index._blocks.set(number, block.to(device), None if live is None else live.to(device))
        if self._ids is not None:
            index._ids = Ids(self._ids.all, {*self._blocks.removed().tolist()})
        return index

    def _append(self, where: str, batches: Iterable[SparseBatch], on_disk: bool, ids: list[Id] | None) -> None:
        """Add documents, in memory all or none, or each block to the folder."""
        held, first = len(self), len(self._blocks.all)
        begun, live = None, None
        if first and len(self._blocks.all[-1]) < postings.DOCUMENTS_PER_BLOCK:
            first -= 1
            begun, live = self._blocks.all[-1], self._blocks.live[-1]
        blocks = in_blocks(require_fitting(where, "batches", batches, self.device, self.vocabulary, self.dtype), begun)
        if not on_disk:
            blocks = [*blocks]
            given = first * postings.DOCUMENTS_PER_BLOCK + sum(map(len, blocks)) - held if blocks else 0
            if ids is not None and len(ids) != given:
                raise _unequal(where, ids, given)
        for number, block in enumerate(blocks, first):
            if ids is not None:
                new = number * postings.DOCUMENTS_PER_BLOCK + len(block) - held
                if new > len(ids):
                    raise _unequal(where, ids, f"more than {len(ids)}")
                self._ids.append(ids[len(self._ids.all) - held : new])
            if on_disk:
                self._stored.write(number, block, self._ids_of_block(number))
                if self.device.type == "cpu":
                    block = self._stored.read(where, number, self.vocabulary)
            if live is not None:
                live = torch.nn.functional.pad(live, (0, len(block) - len(live)), value=True)
            self._blocks.set(number, block, live)
            if on_disk:
                self._describe(self._stored, unfinished=True)
            live = None
        if ids is not None and len(self) - held < len(ids):
            raise _unequal(where, ids, len(self) - held)

    def _ids_of_block(self, number: int) -> list[Id] | None:
        begin = number * postings.DOCUMENTS_PER_BLOCK
        return None if self._ids is None else self._ids.all[begin : begin + postings.DOCUMENTS_PER_BLOCK]

    def _with_ids(self, where: str) -> Ids:
        if self._ids is None:
            raise ValueError(
                f"{where}: documents of the index have no ids; SparseIndex.build(index.vectors(index.live_positions()), "
                "ids=ids) makes one with ids."
            )
        return self._ids

    def _new_ids(self, where: str, ids: Id | Iterable[Id] | None) -> list[Id] | None:
        """Ids of documents to be added; None of an index without."""
        if ids is None and self._ids is None:
            return None
        if ids is None:
            raise ValueError(f"{where}: ids must be given, since the documents of the index have ids.")
        new = as_ids(where, ids)
        self._with_ids(where).require_new(where, new, "SparseIndex.update")
        return new

    def _positions(self, where: str, positions: Iterable[int] | Tensor | None, ids: Id | Iterable[Id] | None) -> Tensor:
        if (positions is None) == (ids is None):
            raise TypeError(f"{where}: documents must be given by positions or by ids.")
        if ids is None:
            return require_positions(where, positions, len(self))
        return self._with_ids(where).positions_of(where, as_ids(where, ids))

    def _describe(self, stored: files.Stored, unfinished: bool = False) -> None:
        removed, has_ids = self._blocks.removed().tolist(), self._ids is not None
        stored.describe(self.vocabulary, self.dtype, len(self._blocks.all), removed, has_ids, unfinished)

    def __getstate__(self) -> dict:
        with self._lock:
            return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state, _lock=threading.RLock())

    def _require_unsharded(self, where: str, what: str = "cannot be changed or saved") -> None:
        if self._shard is not None:
            raise ValueError(f"{where}: an index that was loaded as a shard {what}; load it whole.")


def _unequal(where: str, ids: list[Id], documents: int | str) -> ValueError:
    return ValueError(f"{where}: ids must be as many as documents, got {len(ids)} for {documents}.")


def _device(where: str, device: str | torch.device) -> torch.device:
    """Device as tensors have it; ValueError if it cannot search."""
    require_device(where, torch.device(device))
    return torch.empty(0, device=device).device
