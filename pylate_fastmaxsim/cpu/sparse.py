"""Inner products of sparse queries and documents by SciPy, a few thousand documents at a time."""

from collections.abc import Iterator

import numpy as np
import torch
from scipy.sparse import csr_matrix
from torch import Tensor

from pylate_fastmaxsim.sparse import SparseBatch

# Pairs of a query and a document that are scored at once. A pair takes up to 80 bytes until the best are known.
PAIRS_AT_ONCE = 3 << 20

# Entries of documents that are multiplied at once, of 24 bytes as the float64 matrix and its transpose.
ENTRIES_AT_ONCE = 1 << 22

# The largest vocabulary of which a table says what each term is among the queries' terms, 64 MiB.
TABLE_TERMS = 1 << 24


class PreparedQueries:
    """Queries as float64 matrices over the terms that occur in them, to be multiplied with many blocks of documents."""

    def __init__(self, queries: SparseBatch) -> None:
        self._terms, columns = np.unique(queries.terms.numpy(), return_inverse=True)
        self._table = None
        if queries.vocabulary <= TABLE_TERMS:
            self._table = np.full(queries.vocabulary, -1, dtype=np.int32)
            self._table[self._terms] = np.arange(len(self._terms), dtype=np.int32)
            self._occurs = self._table >= 0
        weights = queries.weights.numpy().astype(np.float64)
        self._matrix = _matrix(weights, columns, queries.offsets.numpy(), len(self._terms))

    def candidates(
        self, documents: SparseBatch, live: Tensor | None, worst: Tensor, floor: Tensor | None = None
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield candidates of a block of ``documents`` on the CPU for the best of each query, in parts.

        ``live`` are the documents that count, bool ``[Nd]``, or None for all. ``worst`` is the k-th best score of each query so
        far, ``[Nq]`` float32, -1 where there are fewer; it is read before each part, so that the caller may update it in between.
        Scores up to ``floor``, ``[Nq]`` float32, are of no use either.

        A part is some of the queries as a slice ``rows``, their scores above both in the order of documents, ``[rows, W]``
        float32 filled up with -1, and the documents that they are of, ``[rows, W]`` int64.
        """
        offsets = documents.offsets.numpy()
        begin = 0
        while begin < len(documents):
            end = int(np.searchsorted(offsets, offsets[begin] + ENTRIES_AT_ONCE, side="right")) - 1
            end = min(max(end, begin + 1), len(documents))
            postings = self._postings(documents, begin, end)
            at_once = max(1, PAIRS_AT_ONCE // (end - begin))
            for first in range(0, self._matrix.shape[0], at_once):
                rows = slice(first, min(first + at_once, self._matrix.shape[0]))
                # The sum of a pair runs over the terms of its query, which ascend.
                products = self._matrix[rows] @ postings
                above = worst[rows] if floor is None else torch.maximum(worst[rows], floor[rows])
                yield rows, *_above(products, above.numpy(), begin, live)
            begin = end

    def _postings(self, documents: SparseBatch, begin: int, end: int) -> csr_matrix:
        """Documents from ``begin`` to before ``end`` by the terms of the queries, ``[terms, end - begin]``."""
        offsets = documents.offsets[begin : end + 1].numpy()
        entries = slice(offsets[0], offsets[-1])
        places, columns = self._matches(documents.terms[entries].numpy())
        weights = documents.weights[entries].numpy()[places].astype(np.float64)
        bounds = np.searchsorted(places, offsets - offsets[0])
        return _matrix(weights, columns, bounds, len(self._terms)).T.tocsr()

    def _matches(self, terms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which of some terms occur in the queries, and where each of these is among the queries' terms."""
        if self._table is not None:
            places = np.flatnonzero(self._occurs[terms])
            return places, self._table[terms[places]]
        columns = np.searchsorted(self._terms, terms)
        columns[columns == len(self._terms)] = 0
        places = np.flatnonzero(self._terms[columns] == terms) if len(self._terms) else columns[:0]
        return places, columns[places]


def _matrix(weights: np.ndarray, columns: np.ndarray, offsets: np.ndarray, width: int) -> csr_matrix:
    index = np.int32 if len(columns) <= np.iinfo(np.int32).max else np.int64
    parts = (weights, columns.astype(index, copy=False), offsets.astype(index, copy=False))
    return csr_matrix(parts, shape=(len(offsets) - 1, width))


def _above(products: csr_matrix, worst: np.ndarray, first: int, live: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scores above ``worst`` of each row, and the documents, the first of which is at ``first``; filled up with -1."""
    scores = products.data.astype(np.float32)
    kept = scores > np.repeat(worst, np.diff(products.indptr))
    if live is not None:
        kept &= live.numpy()[products.indices + first]
    kept = np.flatnonzero(kept)
    bounds = np.searchsorted(kept, products.indptr)
    found = _matrix(scores[kept], products.indices[kept], bounds, products.shape[1])
    # Sorts the documents of each query, in linear time.
    found = found.tocsc().tocsr()
    lengths = torch.from_numpy(np.diff(found.indptr)).long()
    filled = torch.arange(int(lengths.max()) if len(lengths) else 0, device="cpu") < lengths[:, None]
    padded = torch.full(filled.shape, -1.0, device="cpu")
    places = torch.full(filled.shape, -1, device="cpu")
    padded[filled] = torch.from_numpy(found.data)
    places[filled] = torch.from_numpy(found.indices).long() + first
    return padded, places
