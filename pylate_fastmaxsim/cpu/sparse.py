"""Inner products of sparse queries with documents on a CPU, from the entries of each term."""

from collections.abc import Iterable

import numpy as np
from scipy.sparse import csr_matrix

from pylate_fastmaxsim.sparse import SparseBatch

# The largest vocabulary of which each term has a place while entries are sorted, 64 MiB.
TABLE_TERMS = 1 << 24


class Postings:
    """The entries of up to 65,536 documents by term, and of a term in the order of documents.

    With ``wanted`` only those of some terms, which ascend; else they take about as much memory as the documents.
    """

    def __init__(self, documents: SparseBatch, wanted: np.ndarray | None = None) -> None:
        terms, weights, bounds = (each.numpy() for each in (documents.terms, documents.weights, documents.offsets))
        # SciPy, which sorts in linear time, moves float16 as integers.
        entries = weights.view(np.int16) if weights.dtype == np.float16 else weights
        names, width = wanted, documents.vocabulary
        if width > TABLE_TERMS:
            names = np.unique(terms) if wanted is None else wanted
            at, kept = places_in(names, terms)
        elif wanted is not None:
            table = np.full(width, -1, np.int32)
            table[wanted] = np.arange(len(wanted))
            kept = np.flatnonzero((at := table[terms]) >= 0)
            at = at[kept]
        if names is not None:
            terms, entries, width = at, entries[kept], len(names)
            bounds = np.searchsorted(kept, bounds)
        index = np.int32 if len(terms) <= np.iinfo(np.int32).max else np.int64
        parts = (entries, terms.astype(index), bounds.astype(index))
        by_term = csr_matrix(parts, shape=(len(documents), width)).tocsc()
        occurring = np.flatnonzero(np.diff(by_term.indptr))
        self._terms = occurring if names is None else names[occurring]
        self._bounds = by_term.indptr[np.append(occurring, width)]
        self._documents = by_term.indices.astype(np.uint16)
        self._weights = by_term.data.view(weights.dtype)
        self._count = len(documents)
        self.nbytes = sum(each.nbytes for each in (self._terms, self._bounds, self._documents, self._weights))

    def scores(self, terms: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Inner products of a query, whose terms ascend, with all documents, float64; 0 where they share no term."""
        at, known = places_in(self._terms, terms)
        begins, ends = self._bounds[at], self._bounds[at + 1]
        lists = [slice(*each) for each in zip(begins.tolist(), ends.tolist(), strict=True)]
        if not lists:
            return np.zeros(self._count)
        documents = np.concatenate([self._documents[each] for each in lists])
        products = np.concatenate([self._weights[each] for each in lists]).astype(np.float64)
        products *= np.repeat(weights[known].astype(np.float64), ends - begins)
        # It adds up in the order of entries: that of the query's terms.
        return np.bincount(documents, products, self._count)


def places_in(names: np.ndarray, terms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which of some terms are among ``names``, which ascend, as two indices: in ``names``, and in ``terms``."""
    at = np.searchsorted(names, terms)
    at[at == len(names)] = 0
    known = np.flatnonzero(names[at] == terms) if len(names) else at[:0]
    return at[known], known


def best(
    blocks: Iterable[tuple[int, Postings, np.ndarray | None]],
    terms: np.ndarray,
    weights: np.ndarray,
    k: int,
    above: float,
) -> tuple[np.ndarray, np.ndarray]:
    """The ``k`` best documents of a query: float32 scores larger than ``above``, best first, and positions, int64.

    ``blocks``: the position of the first document, which ascends, postings, and which documents count, None for all.
    """
    scores, positions = np.zeros(0, np.float32), np.zeros(0, np.int64)
    for first, postings, live in blocks:
        sums = postings.scores(terms, weights)
        rounded = sums.astype(np.float32)
        new = (sums > 0) & (rounded > above)
        if live is not None:
            new &= live
        found = np.flatnonzero(new)
        scores, positions = np.append(scores, rounded[found]), np.append(positions, found + first)
        if len(scores) > k:
            above = np.partition(scores, -k)[-k]
            kept = scores > above
            # Of equal ones the first.
            kept[np.flatnonzero(scores == above)[: k - np.count_nonzero(kept)]] = True
            scores, positions = scores[kept], positions[kept]
    order = np.argsort(-scores, kind="stable")
    return scores[order], positions[order]
