"""An index with the interface of ``pylate.indexes`` that prunes nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence, Sized
from functools import partial
from itertools import chain, islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pylate_fastmaxsim._checks import require_count
from pylate_fastmaxsim.codec import ResidualCodec
from pylate_fastmaxsim.indexes.storage import Folder, Storage
from pylate_fastmaxsim.retrieval.corpus import Corpus
from pylate_fastmaxsim.retrieval.formats.format import STORED, Batch, format_of, require_chosen
from pylate_fastmaxsim.retrieval.formats.reading import joined
from pylate_fastmaxsim.retrieval.formats.writer import live
from pylate_fastmaxsim.retrieval.ids import Id, as_ids
from pylate_fastmaxsim.retrieval.search import ordered, pair_scores, rounded, search, selected
from pylate_fastmaxsim.retrieval.topk import largest
from pylate_fastmaxsim.tokens import TokenBatch, as_batch

# Of a batch that stays on a device, which is twice there while it is made.
TOKENS_HELD = 1 << 24

# Documents that are put together at once, in memory that is used again for the next ones.
DOCUMENTS_AT_ONCE = 128

# A matrix [L, d], as of NumPy or PyTorch, for each text, padded texts [N, L, d], or the matrix of one text.
Embeddings = Tensor | np.ndarray | Iterable[Tensor | np.ndarray]


class Exact:
    """Scores all documents with MaxSim, where the indexes of PyLate score those that survive pruning.

    It goes where ``pylate.indexes.PLAID`` does: into ``pylate.retrieve.ColBERT(index=...)``, ``pylate.rank.rerank`` and
    PyLate's evaluation. It is built by writing the vectors down, there is nothing to train. Scores are those of
    :func:`pylate_fastmaxsim.retrieval.search.search`: of the vectors as they are stored, with queries rounded likewise; of
    equal scores the document that was added first comes first. ``len`` is the number of documents, and ``ids`` lists them.

    With a folder each batch of documents is on the disk when it counts. A process that is killed leaves the last finished
    batch, from where the folder is opened again. Other processes may read it meanwhile; one at a time changes it, and one
    thread at a time uses an index. What is removed or updated keeps its place on the disk.

    Parameters
    ----------
    index_folder, index_name
        The index is in the folder ``index_folder/index_name``, which may be yet to be made. Without an ``index_folder`` it
        is in memory.
    override
        Begin without documents, and remove those of an index that is there.
    format
        How vectors are stored: ``"bfloat16"``, ``"float16"``, ``"float32"``, ``"int8"``, ``"fp8"`` or a
        :class:`pylate_fastmaxsim.ResidualCodec`, as :func:`pylate_fastmaxsim.compress` takes them. By default that of the
        folder, or bfloat16.
    device
        Where to search; by default the GPU if there is one. On a GPU all documents are kept there from the first search on,
        and divided where several are given, as ``["cuda:0", "cuda:1"]``.
    low_memory
        Read the documents from the folder, or the memory of the CPU, in each search, as is always done on one CPU. For one
        device.

    Raises
    ------
    ValueError
        The folder holds something else, documents of another ``format``, or damaged files, ``format`` is another, or
        ``low_memory`` is for several devices. Methods raise it as well where the folder is damaged, or another process
        changes it.

    Examples
    --------
    >>> import torch
    >>> from pylate_fastmaxsim import indexes
    >>> index = indexes.Exact(device="cpu")
    >>> index = index.add_documents(["a", "b", "c"], [torch.eye(2), 2 * torch.eye(2), torch.ones(1, 2)])
    >>> index([torch.eye(2)], k=2)
    [[{'id': 'b', 'score': 4.0}, {'id': 'a', 'score': 2.0}]]
    >>> index.remove_documents(["b"])([torch.eye(2)], k=1, subset=["a", "c"])
    [[{'id': 'a', 'score': 2.0}]]
    """

    is_end_to_end_index = True  # of PyLate: what it returns is ranked

    def __init__(
        self,
        index_folder: str | os.PathLike | None = None,
        index_name: str = "exact",
        override: bool = False,
        *,
        format: str | ResidualCodec | None = None,
        device: str | torch.device | Sequence[str | torch.device] | None = None,
        low_memory: bool = False,
    ) -> None:
        if not (format is None or isinstance(format, ResidualCodec) or format in STORED):
            raise ValueError(f"Exact: format must be one of {', '.join(STORED)} or a ResidualCodec, got {format!r}.")
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.devices = [*map(torch.device, [device] if isinstance(device, (str, torch.device)) else device)]
        if low_memory and len(self.devices) > 1:
            raise ValueError(f"Exact: low_memory is for one device, got {len(self.devices)}.")
        self._storage = Storage() if index_folder is None else Folder(Path(index_folder, index_name), override)
        self._chosen = format or "bfloat16"
        if format is not None and self._storage.format is not None:
            require_chosen(f"Exact: {index_folder}/{index_name} holds documents", self._storage.format, format)
        # From the first document on, with the number of the device; None: they are read in each search.
        self._held: list[tuple[int, Batch]] | None = None if low_memory or self.devices == [torch.device("cpu")] else []

    def __len__(self) -> int:
        return len(self._storage.ids.positions)

    @property
    def ids(self) -> list[Id]:
        """Ids of all documents, in the order in which they were added."""
        return [*self._storage.ids.positions]

    def add_documents(
        self, documents_ids: Id | Sequence[Id], documents_embeddings: Embeddings, batch_size: int = 2000
    ) -> Exact:
        """Add documents, and return the index.

        Parameters
        ----------
        documents_ids
            A string or an integer for each document, of none that the index holds.
        documents_embeddings
            Vectors of each document, ``[L_i, d]``, floating point, as ``encode`` returns them; they may come from a
            generator. All of one d, on any device.
        batch_size
            Documents that are written at once. With a folder, those of a batch are all there after a kill, or none.

        Raises
        ------
        ValueError
            Ids are given twice or are in the index, there are not as many as documents, the d is not that of the index,
            or a number does not fit the format. Batches before that are added.
        TypeError
            An id or something in the embeddings is of another type.
        OSError
            Writing fails, as on a full disk.
        """
        return self._add("Exact.add_documents", documents_ids, documents_embeddings, batch_size, replace=False)

    def update_documents(
        self, documents_ids: Id | Sequence[Id], documents_embeddings: Embeddings, batch_size: int = 2000
    ) -> Exact:
        """Replace documents, and add those that are new: as :meth:`add_documents`, but ids may be in the index."""
        return self._add("Exact.update_documents", documents_ids, documents_embeddings, batch_size, replace=True)

    def remove_documents(self, documents_ids: Id | Sequence[Id]) -> Exact:
        """Remove documents, which no search scores any more, and return the index.

        ValueError if an id is given twice or not in the index; then none is removed. TypeError if it is none.
        """
        where = "Exact.remove_documents"
        ids = as_ids(where, documents_ids)
        with self._storage.changing(where):
            self._storage.ids.positions_of(where, ids)
            if ids:
                self._storage.remove(ids)
        return self

    @torch.no_grad()
    def __call__(
        self, queries_embeddings: Embeddings, k: int = 10, subset: Sequence[Id] | Sequence[Sequence[Id]] | None = None
    ) -> list[list[dict[str, Id | float]]]:
        """The ``k`` best documents of each query, or all if there are fewer.

        Parameters
        ----------
        queries_embeddings
            Vectors of each query, ``[L_i, d]``, floating point, as ``encode`` returns them.
        k
            Number of documents to return for each query, at least 1.
        subset
            Ids of the documents to choose from, for all queries, or a list of ids for each query. No other is scored.

        Returns
        -------
        list of lists of dict
            For each query its documents, best first: ``{"id": id, "score": MaxSim}``.

        Raises
        ------
        ValueError
            Nothing was added yet, queries have another d, ``k`` is below 1, or ``subset`` has an id that is not in the
            index or not a list for each query.
        TypeError
            Queries are no embeddings, or ``k`` is no integer.
        """
        corpus, k = self._corpus, require_count("Exact", "k", k)
        queries = as_batch("Exact", "queries_embeddings", _listed(queries_embeddings))
        if queries.dim != corpus.dim:
            raise ValueError(
                f"Exact: queries_embeddings must have the d = {corpus.dim} of the index, got {queries.dim}."
            )
        queries = rounded(queries, corpus)
        ids, positions_of = self._storage.ids.all, partial(self._storage.ids.positions_of, "Exact")
        if subset is None or len(subset) == 0 or not isinstance(subset[0], (list, tuple)):
            chosen = self._storage.live if subset is None else positions_of(subset).unique()
            scores, positions = self._best(queries, chosen, subset is not None, k)
            found = zip(scores.tolist(), positions.tolist(), strict=True)
        elif len(subset) != len(queries):
            raise ValueError(
                f"Exact: subset must be ids or a list of ids for each of {len(queries)} queries, got {len(subset)}."
            )
        else:
            found = self._of_subsets(queries, [positions_of(each).unique() for each in subset], k)
        return [[{"id": ids[at], "score": score} for score, at in zip(*row, strict=True)] for row in found]

    def get_documents_embeddings(self, documents_ids: Sequence[Sequence[Id]]) -> list[list[np.ndarray]]:
        """Vectors of lists of documents, as they are scored: float32 ``[L, d]`` each. ValueError if an id is not in the index."""
        groups = []
        for ids in documents_ids:
            batch = self._corpus.select(self._storage.ids.positions_of("Exact.get_documents_embeddings", ids))
            batch = batch if isinstance(batch, TokenBatch) else batch.decompress()
            values = batch.values.float().numpy()
            spans = zip(batch.starts.tolist(), batch.lengths.tolist(), strict=True)
            groups.append([values[start : start + length] for start, length in spans])
        return groups

    @property
    def _corpus(self) -> Corpus:
        if self._storage.corpus is None:
            raise ValueError("Exact: the index is empty; add documents first.")
        return self._storage.corpus

    def _add(self, where: str, ids: object, embeddings: Embeddings, batch_size: int, replace: bool) -> Exact:
        batch_size, ids = require_count(where, "batch_size", batch_size), as_ids(where, ids)
        embeddings = _listed(embeddings)
        if not isinstance(embeddings, Iterable):
            raise TypeError(f"{where}: documents_embeddings must be a list of [L, d], got {type(embeddings).__name__}.")
        given = len(embeddings) if isinstance(embeddings, Sized) else None
        if given not in (None, len(ids)):
            raise _unequal(where, ids, given)
        with self._storage.changing(where):
            if not replace:
                self._storage.ids.require_new(where, ids, "update_documents")
            documents = iter(embeddings)
            for begin in range(0, len(ids), batch_size):
                batch_ids = ids[begin : begin + batch_size]
                sequences = [*islice(documents, len(batch_ids))]
                if len(sequences) < len(batch_ids):
                    raise _unequal(where, ids, begin + len(sequences))
                # The first documents as a whole, since they may set the scale of fp8; a GPU would be waited for.
                whole = self._storage.format is None or getattr(sequences[0], "is_cuda", False)
                size = len(sequences) if whole else DOCUMENTS_AT_ONCE
                blocks = (sequences[at : at + size] for at in range(0, len(sequences), size))
                batches = (live(as_batch(where, "documents_embeddings", block)) for block in blocks)
                first = next(batches)
                format = self._storage.format or format_of(self._chosen, first)
                self._storage.add(format, _of_dim(where, format.dim, chain([first], batches)), batch_ids)
            if given is None and next(documents, None) is not None:
                raise _unequal(where, ids, f"more than {len(ids)}")
        return self

    def _best(self, queries: TokenBatch, chosen: Tensor, is_subset: bool, k: int) -> tuple[Tensor, Tensor]:
        """Scores and positions of each query's best of the documents at ascending positions, on the CPU."""
        if self._held is None:
            documents = (batch for _, batch, _ in self._documents(chosen, is_subset))
            scores, places = search(queries.to(self.devices[0]), documents, k)
            return scores.cpu(), chosen[places.cpu()]
        documents, found = [*self._documents(chosen, is_subset)], []
        for number, device in enumerate(self.devices):
            mine = [(batch, first) for on, batch, first in documents if on == number]
            if mine or not number:
                scores, places = search(queries.to(device), (batch for batch, _ in mine), k)
                found.append((scores, places, [first for _, first in mine], [len(batch) for batch, _ in mine]))
        # Only now, since a copy waits for its device.
        scores = torch.cat([each.cpu() for each, *_ in found], dim=1)
        positions = torch.cat([chosen[_places(*each)] for _, *each in found], dim=1)
        return (scores, positions) if len(found) == 1 else tuple(ordered(scores, positions, k))

    def _of_subsets(
        self, queries: TokenBatch, subsets: list[Tensor], k: int
    ) -> Iterator[tuple[list[float], list[int]]]:
        """Scores and positions of each query's best documents of its own positions, which ascend."""
        device, counts = self.devices[0], torch.tensor([len(each) for each in subsets], device="cpu")
        documents, places = torch.cat(subsets).unique(return_inverse=True)
        which = torch.arange(len(queries), device="cpu").repeat_interleave(counts).to(device)
        batches = (batch.to(device) for _, batch, _ in self._documents(documents, True))
        scores = pair_scores(queries.to(device), which, places.to(device), batches).cpu()
        for row, positions in zip(scores.split(counts.tolist()), subsets, strict=True):
            best = largest(row[None], min(k, len(row)))[0]
            yield row[best].tolist(), positions[best].tolist()

    def _documents(self, positions: Tensor, is_subset: bool) -> Iterator[tuple[int, Batch, int]]:
        """Documents at ascending positions, in batches: on which device each is, and which position is its first one's."""
        if self._held is None and is_subset:
            for batch in selected(self._corpus, positions, self.devices[0]):
                yield 0, batch, 0
            return
        self._hold()
        first = 0
        for number, batch in self._held or ((0, each) for each in self._corpus.batches(self.devices[0])):
            begin, end = torch.searchsorted(positions, positions.new_tensor([first, first + len(batch)])).tolist()
            if end - begin == len(batch):
                yield number, batch, begin
            elif begin < end:
                yield number, batch.select((positions[begin:end] - first).to(batch.device)), begin
            first += len(batch)

    def _hold(self) -> None:
        """Copy those documents to the devices that are not there yet."""
        held, corpus = self._held, self._corpus
        begin = sum(len(batch) for _, batch in held or ())
        if held is None or begin == len(corpus):
            return
        sizes = [
            (number, len(batch.values if isinstance(batch, TokenBatch) else batch.tokens)) for number, batch in held
        ]
        tokens = [sum(size for on, size in sizes if on == number) for number in range(len(self.devices))]
        ends = corpus.lengths(begin).cumsum(0)
        # In few batches, since each is searched by itself, and as many on each device.
        most = max(1, min(TOKENS_HELD, -(-int(ends[-1]) // len(self.devices))))
        growing, room = [], most
        if sizes and sizes[-1][1] < TOKENS_HELD:
            number, room = sizes[-1][0], TOKENS_HELD - sizes[-1][1]
            growing = [held.pop()[1]]
        done = copied = 0
        while done < len(ends):
            count = max(int(torch.searchsorted(ends[done:], copied + room, right=True)), 0 if growing else 1)
            number = number if growing else tokens.index(min(tokens))
            new = corpus.batches(self.devices[number], begin=begin + done, end=begin + done + count)
            held.append((number, joined([*growing, *new])))
            done, before = done + count, copied
            copied = int(ends[done - 1]) if done else 0
            tokens[number] += copied - before
            growing, room = [], most


def _places(places: Tensor, firsts: list[int], counts: list[int]) -> Tensor:
    """Where documents of batches, counted through all of these, lie among all documents."""
    firsts, counts = (torch.tensor(each, dtype=torch.int64, device="cpu") for each in (firsts, counts))
    places, ends = places.cpu(), counts.cumsum(0)
    return places + (firsts - (ends - counts))[torch.searchsorted(ends, places, right=True)]


def _listed(embeddings: Embeddings) -> Embeddings:
    """The matrix of one text as a list."""
    return [embeddings] if getattr(embeddings, "ndim", None) == 2 else embeddings


def _of_dim(where: str, dim: int, batches: Iterable[TokenBatch]) -> Iterator[TokenBatch]:
    for batch in batches:
        if batch.dim != dim:
            raise ValueError(f"{where}: documents_embeddings must have the d = {dim} of the index, got {batch.dim}.")
        yield batch


def _unequal(where: str, ids: list[Id], given: int | str) -> ValueError:
    return ValueError(
        f"{where}: documents_ids and documents_embeddings must be of equal length, got {len(ids)} and {given}."
    )
