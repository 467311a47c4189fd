"""Documents of a folder with their ids, to be written elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pylate_fastmaxsim.indexes.storage import Folder
from pylate_fastmaxsim.retrieval.corpus import Corpus
from pylate_fastmaxsim.retrieval.formats import description
from pylate_fastmaxsim.retrieval.formats.format import Batch
from pylate_fastmaxsim.retrieval.formats.writer import live
from pylate_fastmaxsim.retrieval.ids import Id
from pylate_fastmaxsim.retrieval.sparse import files as sparse_files
from pylate_fastmaxsim.retrieval.sparse.index import SparseIndex
from pylate_fastmaxsim.sparse import SparseBatch
from pylate_fastmaxsim.tokens import TokenBatch

# In the folder that `fastmaxsim search --index` keeps, that of the documents.
_INSIDE = ("documents", "sparse")


@dataclass(frozen=True)
class Source:
    """Documents that are not removed. ``state`` is another one once the folder has changed, in plain JSON."""

    state: list[Any]
    ids: Sequence[Id]  # where there are none, positions
    positions: Tensor  # ascending, int64

    def __len__(self) -> int:
        return len(self.positions)

    def with_ids(self, begin: int, most: int) -> Iterator[tuple[Sequence[Id], Batch | SparseBatch]]:
        """The documents behind the first ``begin``, in batches of at most so many tokens, or sparse vectors, with ids."""
        for batch in self.batches(begin, most):
            yield self.ids[begin : begin + len(batch)], batch
            begin += len(batch)


@dataclass(frozen=True)
class Dense(Source):
    """Token embeddings of a corpus or of an ``Exact`` index."""

    corpus: Corpus

    def batches(self, begin: int, tokens: int, device: str | torch.device = "cpu") -> Iterator[Batch]:
        """The documents behind the first ``begin``, in order, in batches of at most so many tokens, or of one document."""
        if begin == len(self):
            return
        first, left = int(self.positions[begin]), self.positions[begin:]
        for batch in self.corpus.batches(device, tokens, first):
            here = torch.searchsorted(left, first + len(batch))
            if here == len(batch):
                yield batch
            elif here:
                yield batch.select((left[:here] - first).to(batch.device))
            first, left = first + len(batch), left[here:]

    def vectors(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Vectors of a batch ``[T, d]``, float32 where the corpus holds that, else float16, and where documents begin and end."""
        batch = live(batch if isinstance(batch, TokenBatch) else batch.decompress())
        values = batch.values.to(torch.float32 if self.corpus.dtype == torch.float32 else torch.float16)
        if bool((values.isinf() & batch.values.isfinite()).any()):
            raise ValueError("export: vectors hold numbers that are too large for float16; normalise them.")
        return values, torch.nn.functional.pad(batch.lengths.cumsum(0), (1, 0))


@dataclass(frozen=True)
class Sparse(Source):
    """Vectors of a sparse index, which are mapped into memory."""

    index: SparseIndex

    def batches(self, begin: int, documents: int) -> Iterator[SparseBatch]:
        """The documents behind the first ``begin``, in order, in batches of at most so many."""
        for at in range(begin, len(self), documents):
            yield self.index.vectors(self.positions[at : at + documents])


def source_of(folder: Path) -> Dense | Sparse:
    """The documents of a folder. ValueError if it has none, or is damaged."""
    folder = next((folder / name for name in _INSIDE if (folder / name).is_dir()), folder)
    if (folder / sparse_files.DESCRIPTION_FILE).exists():
        index = SparseIndex.load(folder)
        positions = index.live_positions()
        state = sparse_files.read_description("export", folder).state
        found = Sparse([*state], positions.tolist() if index.ids is None else index.ids, positions, index)
    elif (folder / description.DESCRIPTION_FILE).exists() or any(folder.glob("rank-*-of-*")):
        parts = [description.read(each) for each in description.folders(folder)]
        if parts[0].ids is None:
            corpus = Corpus(folder)
            ids, positions = range(len(corpus)), torch.arange(len(corpus), device="cpu")
        else:
            index = Folder(folder, override=False)
            corpus, parts = index.corpus, [index._held]
            ids, positions = [*index.ids.positions], index.live
        found = Dense([[each.identity, each.generation] for each in parts], ids, positions, corpus)
    else:
        raise ValueError(
            f"export: {folder} must hold a SparseIndex, a corpus of write_corpus or an index of indexes.Exact, whole; "
            "a model or an index of PLAID is none of these."
        )
    if not len(found):
        raise ValueError(f"export: {folder} holds no documents.")
    return found
