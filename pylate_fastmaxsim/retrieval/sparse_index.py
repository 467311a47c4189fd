"""An index of sparse documents that is searched exactly, in memory, on disk, on a GPU or shared among several."""

from __future__ import annotations

import functools
import os
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from pylate_fastmaxsim._checks import require_count, require_positions
from pylate_fastmaxsim.files.lock import holds_something, writing
from pylate_fastmaxsim.files.record import read_again_if_replaced
from pylate_fastmaxsim.kernels.sparse import postings
from pylate_fastmaxsim.ops.gathered import all_gather, rank_and_ranks
from pylate_fastmaxsim.retrieval import sparse_files as files
from pylate_fastmaxsim.retrieval.sparse_search import (
    in_blocks,
    require_device,
    require_fitting,
    search_blocks,
    searchable,
)
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

    Made by :meth:`build` or :meth:`load`. A document keeps its position, whatever is added or removed. ``len`` counts all
    positions, also those of removed documents. The scores and their order are the same bits on a CPU (SciPy) and on a
    CUDA GPU. Threads may share an index, of which one at a time searches or changes it.

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
    """

    def __init__(self, vocabulary: int, dtype: torch.dtype, device: torch.device) -> None:
        """Use :meth:`build` or :meth:`load`."""
        self.vocabulary, self.dtype, self.device = vocabulary, dtype, device
        self._blocks: list[SparseBatch] = []
        self._live: list[Tensor | None] = []  # which documents are not removed; None: all
        self._searched = searchable(vocabulary, device)
        # Where the blocks are on disk, if anywhere: of a block there, its line of the description.
        self._folder: Path | None = None
        self._written: dict[int, files.Block] = {}
        self._state = files.new_state()  # of the description there
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

        Raises
        ------
        ValueError
            There is no batch, vocabularies differ, float32 weights follow float16 ones, ``folder`` holds something and
            ``batches`` is no function, a file of an earlier build is damaged, or another process writes the folder.
        TypeError
            Something in ``batches`` is no batch.
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
                index._folder = folder
                batches = chain([first], batches)
            index._append(where, batches, folder)
            if folder is not None:
                index._describe(folder, index._written, index._state)
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
        index._folder, index._first_block = folder, blocks.start
        index._state = description.state
        index._documents_of_all = description.documents
        for number in blocks:
            line = description.blocks[number]
            block = files.read_block(where, folder, number, line, description.vocabulary)
            first = number * postings.DOCUMENTS_PER_BLOCK
            begin, end = (bisect_left(description.removed, first + each) for each in (0, line.documents))
            live = None
            if begin < end:
                gone = torch.tensor(description.removed[begin:end], device=device) - first
                live = _all_live(line.documents, device).index_fill_(0, gone, False)
            index._written[len(index._blocks)] = line
            index._set(len(index._blocks), block.to(device), live)
        return index

    def __len__(self) -> int:
        return sum(map(len, self._blocks)) if self._shard is None else self._documents_of_all

    def __repr__(self) -> str:
        removed = len(self._removed())
        documents = f"{len(self)} documents{f', of which {removed} are removed' if removed else ''}"
        shard = f", shard {self._shard[0]} of {self._shard[1]}" if self._shard else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"SparseIndex({documents}, vocabulary {self.vocabulary}, {dtype}, on {self.device}{shard})"

    @property
    def nbytes(self) -> int:
        """Bytes of the documents that this process holds, mapped ones too, with their postings (a CPU has them after two searches)."""
        return self._searched.nbytes

    def live_positions(self) -> Tensor:
        """Positions of the documents that are not removed, ascending, int64, on the CPU.

        Raises
        ------
        ValueError
            The index is a shard, which knows only its own.
        """
        if self._shard is not None:
            raise ValueError("SparseIndex.live_positions: a shard does not know which documents of others are removed.")
        return _all_live(len(self), torch.device("cpu")).index_fill_(0, self._removed(), False).nonzero().flatten()

    @_exclusive
    def add(self, batches: Batches) -> None:
        """Add documents behind the last one, in any form that :meth:`build` takes.

        Changes the index in memory; :meth:`save` writes the blocks that are new or have grown. More documents than fit in
        memory are added by :meth:`build`, with a function.

        Raises
        ------
        ValueError
            A batch differs from the index in vocabulary, its weights are float32 and those of the index float16, or the
            index is a shard. Batches before it have been added, in whole blocks.
        TypeError
            Something in ``batches`` is no batch.
        """
        self._require_unsharded("SparseIndex.add")
        self._append("SparseIndex.add", sparse_batches("SparseIndex.add", "batches", batches), None)

    @_exclusive
    def remove(self, positions: Iterable[int] | Tensor) -> None:
        """Remove documents: no search returns them any more. All others keep their positions.

        Their memory is not freed.

        Parameters
        ----------
        positions
            Integers, in any order: a list, or an int64 tensor.

        Raises
        ------
        ValueError
            A position is not in the index, is removed already or occurs twice, or the index is a shard. Then none is
            removed.
        TypeError
            Positions are no integers; a mask is ``mask.nonzero().flatten()``.
        """
        self._require_unsharded("SparseIndex.remove")
        positions = require_positions("SparseIndex.remove", positions, len(self))
        positions, counts = positions.unique(return_counts=True)
        if bool((counts > 1).any()):
            raise ValueError(f"SparseIndex.remove: position {positions[counts > 1][0]} is given twice.")
        numbers = positions // postings.DOCUMENTS_PER_BLOCK
        changed = {}
        for number in numbers.unique().tolist():
            places = (positions[numbers == number] % postings.DOCUMENTS_PER_BLOCK).to(self.device)
            live = self._live[number]
            live = _all_live(len(self._blocks[number]), self.device) if live is None else live
            if not bool((kept := live[places]).all()):
                gone = places[~kept][0] + number * postings.DOCUMENTS_PER_BLOCK
                raise ValueError(f"SparseIndex.remove: position {gone} is removed already.")
            changed[number] = live.index_fill(0, places, False)
        for number, live in changed.items():
            self._set(number, self._blocks[number], live)

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
            generation = (self._state[1], int(self._state[0], 16) >> 1)
            _require_same_on_all_ranks(where, self._shard, queries, k, generation)
        first = self._first_block * postings.DOCUMENTS_PER_BLOCK
        found = search_blocks(self._searched, queries, k, first)
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
            written, state = dict(self._written), self._state
            if self._folder is None or folder.resolve() != self._folder.resolve():
                if holds_something(folder):
                    raise ValueError(
                        f"{where}: {folder} must be empty, or the folder that this index is from; choose another folder, or "
                        "remove what it holds."
                    )
                written, state = {}, files.new_state()
            elif (held := files.read_state(where, folder)) and held.state != state:
                raise ValueError(
                    f"{where}: {folder} was written by others since this index was loaded or saved; load it again, or save "
                    "in another folder."
                )
            for number, block in enumerate(self._blocks):
                line = written.get(number)
                if line is None or line.documents != len(block) or not line.file(folder, number).exists():
                    written[number] = files.write_block(folder, number, block)
            self._describe(folder, written, state)

    @_exclusive
    def to(self, device: str | torch.device) -> SparseIndex:
        """The index on another device, a CPU or a CUDA GPU; itself if it is there."""
        device = _device("SparseIndex.to", device)
        if device == self.device:
            return self
        index = SparseIndex(self.vocabulary, self.dtype, device)
        for name in ("_folder", "_state", "_shard", "_first_block", "_documents_of_all"):
            setattr(index, name, getattr(self, name))
        index._written = dict(self._written)
        for number, (block, live) in enumerate(zip(self._blocks, self._live, strict=True)):
            index._set(number, block.to(device), None if live is None else live.to(device))
        return index

    def _append(self, where: str, batches: Iterable[SparseBatch], folder: Path | None) -> None:
        """Add documents, with a folder on disk."""
        first = len(self._blocks)
        begun, live = None, None
        if first and len(self._blocks[-1]) < postings.DOCUMENTS_PER_BLOCK:
            first -= 1
            begun, live = self._blocks[-1], self._live[-1]
        fitting = require_fitting(where, "batches", batches, self.device, self.vocabulary, self.dtype)
        for number, block in enumerate(in_blocks(fitting, begun), first):
            line = None if folder is None else files.write_block(folder, number, block)
            if line is not None and self.device.type == "cpu":
                block = files.read_block(where, folder, number, line, self.vocabulary)
            if live is not None:
                live = torch.nn.functional.pad(live, (0, len(block) - len(live)), value=True)
            self._set(number, block, live)
            if line is not None:
                self._written[number] = line
                self._describe(folder, self._written, self._state, unfinished=True)
            live = None

    def _set(self, number: int, block: SparseBatch, live: Tensor | None) -> None:
        if number == len(self._blocks):
            self._blocks.append(block)
            self._live.append(live)
        self._blocks[number], self._live[number] = block, live
        self._searched.set(number, block.offsets, block.terms, block.weights, live)

    def _describe(
        self, folder: Path, written: dict[int, files.Block], state: tuple[str, int], unfinished: bool = False
    ) -> None:
        """Write the description of the generation after ``state``; if it is finished, ``index.json``."""
        blocks, state = [written[number] for number in range(len(self._blocks))], (state[0], state[1] + 1)
        description = files.Description(self.vocabulary, self.dtype, blocks, self._removed().tolist(), state)
        files.write_description(folder, description, unfinished=unfinished)
        if not unfinished:
            self._folder, self._written, self._state = folder, dict(enumerate(blocks)), state

    def _removed(self) -> Tensor:
        """Positions of removed documents, ascending, on the CPU."""
        removed = [
            (~live).nonzero().flatten().cpu() + number * postings.DOCUMENTS_PER_BLOCK
            for number, live in enumerate(self._live)
            if live is not None
        ]
        return torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *removed])

    def __getstate__(self) -> dict:
        with self._lock:
            return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state, _lock=threading.RLock())

    def _require_unsharded(self, where: str) -> None:
        if self._shard is not None:
            raise ValueError(f"{where}: an index that was loaded as a shard cannot be changed or saved; load it whole.")


def _all_live(documents: int, device: torch.device) -> Tensor:
    return torch.ones(documents, dtype=torch.bool, device=device)


def _device(where: str, device: str | torch.device) -> torch.device:
    """Device as tensors have it; ValueError if it cannot search."""
    require_device(where, torch.device(device))
    return torch.empty(0, device=device).device


def _require_same_on_all_ranks(
    where: str, shard: tuple[int, int], queries: SparseBatch, k: int, generation: tuple[int, int]
) -> None:
    """Raise the same ValueError on all ranks unless they ask the same."""
    if rank_and_ranks() != tuple(shard):
        rank, ranks = rank_and_ranks()
        raise ValueError(
            f"{where}: the index was loaded for rank {shard[0]} of {shard[1]}, but this is rank {rank} of {ranks} of the "
            "default process group."
        )
    if shard[1] == 1:  # there may be no process group
        return
    # Any sum of all numbers that changes with their order.
    numbers = torch.cat([queries.offsets, queries.terms.long(), queries.weights.double().view(torch.int64)])
    sum_of_all = (numbers * torch.arange(1, 2 * len(numbers), 2, device=numbers.device)).sum()
    asked = all_gather(torch.stack([sum_of_all, *sum_of_all.new_tensor([k, *generation])]))
    if bool((asked[:, 2:] != asked[0, 2:]).any()):
        raise ValueError(f"{where}: ranks have loaded different states of the index; load it again on all ranks.")
    if bool((asked != asked[0]).any()):
        raise ValueError(f"{where}: all ranks must pass the same queries and k, since each searches its share for all.")
