"""Sparse documents in memory, in blocks of a fixed size, of which some are removed."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pylate_fastmaxsim.kernels.sparse import postings
from pylate_fastmaxsim.retrieval.sparse.search import in_blocks, searchable
from pylate_fastmaxsim.sparse import SparseBatch


class Blocks:
    """Documents on one device. ``len`` counts also those that are removed."""

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self.vocabulary, self.device = vocabulary, device
        self.all: list[SparseBatch] = []
        self.live: list[Tensor | None] = []  # which documents are not removed; None: all
        self.searched = searchable(vocabulary, device)

    def __len__(self) -> int:
        return sum(map(len, self.all))

    def set(self, number: int, block: SparseBatch, live: Tensor | None) -> None:
        """Replace a block, or add the next."""
        if number == len(self.all):
            self.all.append(block)
            self.live.append(live)
        self.all[number], self.live[number] = block, live
        self.searched.set(number, block.offsets, block.terms, block.weights, live)

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
        return all_live(len(self), torch.device("cpu")).index_fill_(0, self.removed(), False).nonzero().flatten()

    def remove(self, where: str, positions: Tensor) -> None:
        """Remove documents. ValueError if one is removed already; then none is."""
        _, chosen = self._by_block(where, positions)
        for number, places in chosen:
            live = self.live[number]
            live = all_live(len(self.all[number]), self.device) if live is None else live
            self.set(number, self.all[number], live.index_fill(0, places, False))

    def select(self, where: str, positions: Tensor) -> SparseBatch:
        """A copy of the documents at some positions (int64, of at least one), in that order. ValueError if one is removed."""
        order, chosen = self._by_block(where, positions)
        selected = SparseBatch.concatenate(self.all[number].select(places) for number, places in chosen)
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

    def compacted(self) -> tuple[Blocks, int]:
        """The documents that are not removed, and how many blocks are as they were."""
        kept = next((number for number, live in enumerate(self.live) if live is not None), len(self.all))
        compacted = Blocks(self.vocabulary, self.device)
        for number, block in enumerate(self.all[:kept]):
            compacted.set(number, block, None)
        for number, block in enumerate(in_blocks(self._live_from(kept)), kept):
            compacted.set(number, block, None)
        return compacted, kept

    def _live_from(self, begin: int) -> Iterator[SparseBatch]:
        for block, live in zip(self.all[begin:], self.live[begin:], strict=True):
            yield block if live is None else block.select(live.nonzero().flatten())


def all_live(documents: int, device: torch.device) -> Tensor:
    """A mask of documents none of which is removed."""
    return torch.ones(documents, dtype=torch.bool, device=device)
