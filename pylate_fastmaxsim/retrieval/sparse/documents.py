"""Documents of a sparse index: blocks of a fixed size in memory, of which some are removed, their ids and their files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from pylate_fastmaxsim._checks import require_positions
from pylate_fastmaxsim.kernels.sparse import postings
from pylate_fastmaxsim.retrieval.ids import Id, Ids, as_ids, from_lines
from pylate_fastmaxsim.retrieval.sparse.files import Description, Stored, read_block, write_description
from pylate_fastmaxsim.retrieval.sparse.search import in_blocks, require_fitting, searchable
from pylate_fastmaxsim.sparse import SparseBatch


class Documents:
    """Documents on one device. ``len`` counts also those that are removed."""

    def __init__(
        self, vocabulary: int, dtype: torch.dtype, device: torch.device, stored: Stored, ids: Ids | None = None
    ) -> None:
        self.vocabulary, self.dtype, self.device = vocabulary, dtype, device
        self.blocks: list[SparseBatch] = []
        self.live: list[Tensor | None] = []  # which documents are not removed; None: all
        self.searched = searchable(vocabulary, device)
        self.stored = stored
        self.ids = ids  # None: documents have none

    @classmethod
    def read(cls, where: str, folder: Path, device: torch.device, description: Description, blocks: range) -> Documents:
        """Read some of the blocks of a folder."""
        documents = cls(description.vocabulary, description.dtype, device, Stored(folder, state=description.state))
        names: list[Id] = []
        removed = torch.tensor(description.removed, dtype=torch.int64, device="cpu")
        live_of_all = _all_live(description.documents, removed.device).index_fill_(0, removed, False)
        has_ids = description.has_ids and len(blocks) == len(description.blocks)  # a shard does without
        for place, number in enumerate(blocks):
            line = description.blocks[number]
            block, ids = read_block(where, folder, number, line, description.vocabulary)
            names += from_lines(ids) if has_ids else []
            first = number * postings.DOCUMENTS_PER_BLOCK
            live = live_of_all[first : first + line.documents]
            documents.stored.written[place] = line
            documents.set(place, block.to(device), None if bool(live.all()) else live.to(device))
        if has_ids:
            documents.ids = Ids(names, {*description.removed})
        return documents

    def __len__(self) -> int:
        return sum(map(len, self.blocks))

    def set(self, number: int, block: SparseBatch, live: Tensor | None) -> None:
        """Replace a block, or add the next."""
        if number == len(self.blocks):
            self.blocks.append(block)
            self.live.append(live)
        self.blocks[number], self.live[number] = block, live
        self.searched.set(number, block.offsets, block.terms, block.weights, live)

    def append(self, where: str, batches: Iterable[SparseBatch], on_disk: bool, ids: list[Id] | None) -> None:
        """Add documents, in memory all or none, or each block to the folder."""
        held, first = len(self), len(self.blocks)
        begun, live = None, None
        if first and len(self.blocks[-1]) < postings.DOCUMENTS_PER_BLOCK:
            first -= 1
            begun, live = self.blocks[-1], self.live[-1]
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
                self.ids.append(ids[len(self.ids.all) - held : new])
            if on_disk:
                line = self.stored.write(number, block, self._ids_of_block(number))
                if self.device.type == "cpu":
                    block, _ = read_block(where, self.stored.folder, number, line, self.vocabulary)
            if live is not None:
                live = torch.nn.functional.pad(live, (0, len(block) - len(live)), value=True)
            self.set(number, block, live)
            if on_disk:
                self.describe(self.stored, unfinished=True)
            live = None
        if ids is not None and len(self) - held < len(ids):
            raise _unequal(where, ids, len(self) - held)

    def save(self, where: str, folder: Path) -> None:
        """Write the blocks that a folder lacks, and the description. The caller holds the folder's lock."""
        stored = self.stored.to_save(where, folder)
        for number, block in enumerate(self.blocks):
            if not stored.has(number, block):
                stored.write(number, block, self._ids_of_block(number))
        self.describe(stored)
        self.stored = stored

    def describe(self, stored: Stored, unfinished: bool = False) -> None:
        """Write the description of the blocks in a folder."""
        lines, state = [stored.written[number] for number in range(len(self.blocks))], stored.state.next
        removed, has_ids = self.removed().tolist(), self.ids is not None
        description = Description(self.vocabulary, self.dtype, lines, removed, state, has_ids)
        write_description(stored.folder, description, unfinished=unfinished)
        if not unfinished:
            stored.written, stored.state = dict(enumerate(lines)), state

    def _ids_of_block(self, number: int) -> list[Id] | None:
        begin = number * postings.DOCUMENTS_PER_BLOCK
        return None if self.ids is None else self.ids.all[begin : begin + postings.DOCUMENTS_PER_BLOCK]

    def to(self, device: torch.device) -> Documents:
        """The documents on another device."""
        stored = replace(self.stored, written=dict(self.stored.written))
        ids = None if self.ids is None else Ids(self.ids.all, {*self.removed().tolist()})
        copied = Documents(self.vocabulary, self.dtype, device, stored, ids)
        for number, (block, live) in enumerate(zip(self.blocks, self.live, strict=True)):
            copied.set(number, block.to(device), None if live is None else live.to(device))
        return copied

    def require_ids(self, where: str) -> Ids:
        """The ids of the documents; ValueError if they have none."""
        if self.ids is None:
            raise ValueError(
                f"{where}: documents of the index have no ids; SparseIndex.build(index.vectors(index.live_positions()), "
                "ids=ids) makes one with ids."
            )
        return self.ids

    def new_ids(self, where: str, ids: Id | Iterable[Id] | None) -> list[Id] | None:
        """Ids of documents to be added; None of documents without."""
        if ids is None and self.ids is None:
            return None
        if ids is None:
            raise ValueError(f"{where}: ids must be given, since the documents of the index have ids.")
        new = as_ids(where, ids)
        self.require_ids(where).require_new(where, new, "SparseIndex.update")
        return new

    def positions(self, where: str, positions: Iterable[int] | Tensor | None, ids: Id | Iterable[Id] | None) -> Tensor:
        """Positions of documents that are given by either."""
        if (positions is None) == (ids is None):
            raise TypeError(f"{where}: documents must be given by positions or by ids.")
        if ids is None:
            return require_positions(where, positions, len(self))
        return self.require_ids(where).positions_of(where, as_ids(where, ids))

    def removed(self) -> Tensor:
        """Positions of removed documents, ascending, int64, on the CPU."""
        removed = [
            (~live).nonzero().flatten().cpu() + number * postings.DOCUMENTS_PER_BLOCK
            for number, live in enumerate(self.live)
            if live is not None
        ]
        return torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *removed])

    def live_positions(self) -> Tensor:
        """Positions of all others, likewise."""
        return _all_live(len(self), torch.device("cpu")).index_fill_(0, self.removed(), False).nonzero().flatten()

    def remove(self, where: str, positions: Tensor) -> None:
        """Remove documents. ValueError if one is removed already; then none is."""
        _, chosen = self._by_block(where, positions)
        for number, places in chosen:
            live = self.live[number]
            live = _all_live(len(self.blocks[number]), self.device) if live is None else live
            self.set(number, self.blocks[number], live.index_fill(0, places, False))

    def select(self, where: str, positions: Tensor) -> SparseBatch:
        """A copy of the documents at some positions (int64, of at least one), in that order. ValueError if one is removed."""
        order, chosen = self._by_block(where, positions)
        selected = SparseBatch.concatenate(self.blocks[number].select(places) for number, places in chosen)
        return selected.select(order.argsort().to(self.device))

    def _by_block(self, where: str, positions: Tensor) -> tuple[Tensor, list[tuple[int, Tensor]]]:
        """Positions by block: their order, and of each block its number and their places in it."""
        numbers, order = (positions // postings.DOCUMENTS_PER_BLOCK).sort(stable=True)
        numbers, counts = numbers.unique_consecutive(return_counts=True)
        places = (positions[order] % postings.DOCUMENTS_PER_BLOCK).to(self.device).split(counts.tolist())
        chosen = [*zip(numbers.tolist(), places, strict=True)]
        for number, places in chosen:
            live = self.live[number]
            if live is not None and not bool((kept := live[places]).all()):
                gone = places[~kept][0] + number * postings.DOCUMENTS_PER_BLOCK
                raise ValueError(f"{where}: position {gone} is removed already.")
        return order, chosen

    def compacted(self) -> Documents:
        """The documents that are not removed. Blocks before the first that has lost one are as they were, on disk too."""
        kept = next((number for number, live in enumerate(self.live) if live is not None), len(self.blocks))
        ids = None if self.ids is None else Ids(self.ids.positions)
        compacted = Documents(self.vocabulary, self.dtype, self.device, self.stored, ids)
        for number, block in enumerate(chain(self.blocks[:kept], in_blocks(self._live_from(kept)))):
            compacted.set(number, block, None)
        self.stored.written = {number: line for number, line in self.stored.written.items() if number < kept}
        return compacted

    def _live_from(self, begin: int) -> Iterator[SparseBatch]:
        for block, live in zip(self.blocks[begin:], self.live[begin:], strict=True):
            yield block if live is None else block.select(live.nonzero().flatten())


def _unequal(where: str, ids: list[Id], documents: int | str) -> ValueError:
    return ValueError(f"{where}: ids must be as many as documents, got {len(ids)} for {documents}.")


def _all_live(documents: int, device: torch.device) -> Tensor:
    """A mask of documents none of which is removed."""
    return torch.ones(documents, dtype=torch.bool, device=device)
