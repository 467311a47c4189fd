"""Sparse vectors in awkward numbers for tests, and search by sorting all of SciPy's scores."""

import numpy as np
import scipy.sparse
import torch

from pylate_fastmaxsim import SparseBatch


def sparse_vectors(
    count: int, vocabulary: int, seed: int, *, every: int = 3, dtype: torch.dtype = torch.float32
) -> SparseBatch:
    """Vectors of up to 6 terms, some without any. In one of ``every`` there is term 0. Many weights are equal."""
    numbers = np.random.default_rng(seed)
    rows = []
    for row in range(count):
        terms = numbers.choice(min(vocabulary, 1 << 20), size=min(vocabulary, numbers.integers(7)), replace=False)
        terms = {0, *terms.tolist()} if row % every == 0 else {*terms.tolist()}
        weights = [0.0, 0.5, 1.0, 1.0, 1.5, float(np.float16(numbers.random()))]
        # Spread over all of a huge vocabulary.
        spread = max(1, vocabulary // (1 << 20))
        rows.append([(int(term) * spread, weights[numbers.integers(len(weights))]) for term in terms])
    batch = SparseBatch.from_lists(rows, vocabulary)
    return SparseBatch(batch.offsets, batch.terms, batch.weights.to(dtype), vocabulary)


def scipy_products(queries: SparseBatch, documents: SparseBatch) -> np.ndarray:
    """Inner products in float64, ``[Nq, Nd]``, of which SciPy adds up each in ascending order of terms."""
    matrices = [batch.to_scipy() for batch in (queries, documents)]
    # The transposed documents have a row for each term, too many of a huge vocabulary.
    used = np.unique(np.concatenate([matrix.indices for matrix in matrices]))
    left, right = (
        scipy.sparse.csr_array(
            (matrix.data.astype(np.float64), np.searchsorted(used, matrix.indices), matrix.indptr),
            shape=(matrix.shape[0], len(used)),
        )
        for matrix in matrices
    )
    return (left @ right.T.tocsr()).toarray()


def sorted_scores(
    queries: SparseBatch, documents: SparseBatch, k: int, removed: set[int] = frozenset()
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``k`` best by SciPy in float64 and a stable sort."""
    exact = scipy_products(queries, documents)
    exact[:, sorted(removed)] = 0
    scores = np.where(exact > 0, exact.astype(np.float32), np.float32(-1))
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    best = np.take_along_axis(scores, order, axis=1)
    order[best < 0], best[best < 0] = -1, 0
    padding = ((0, 0), (0, k - order.shape[1]))
    best, order = np.pad(best, padding), np.pad(order, padding, constant_values=-1)
    return torch.from_numpy(best), torch.from_numpy(order)


def assert_same(found, expected) -> None:
    """Scores and positions, bit for bit, on any device."""
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours.cpu(), theirs), (ours, theirs)
