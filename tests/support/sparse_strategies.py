"""Sparse queries and documents drawn by hypothesis."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from pylate_fastmaxsim import SparseBatch

VOCABULARIES = (1, 16, 65_536, 65_537, 1 << 31)
# The square of a tiny weight is 0 in float32.
WEIGHTS = {"one": [1.0], "few": [0.0, 0.5, 1.0, 2.0], "tiny": [2.0**-140, 2.0**-100, 1.0], "any": None}


@dataclass
class SparseProblem:
    queries: SparseBatch
    documents: SparseBatch
    k: int


def random_batch(
    generator: np.random.Generator, count: int, vocabulary: int, most: int = 12, weights: str = "any"
) -> SparseBatch:
    """Vectors of 0 to ``most`` entries over at most 60 terms, the first and the last of the vocabulary among them."""
    terms = np.linspace(0, vocabulary - 1, min(vocabulary, 60)).astype(np.int64)
    rows = []
    for size in generator.integers(0, min(most, len(terms)) + 1, count):
        chosen = WEIGHTS[weights]
        # Over so many orders of magnitude that sums in float64 depend on their order.
        values = generator.lognormal(sigma=5, size=size) if chosen is None else generator.choice(chosen, size)
        rows.append(list(zip(generator.choice(terms, size, replace=False).tolist(), values.tolist(), strict=True)))
    return SparseBatch.from_lists(rows, vocabulary)


@st.composite
def sparse_problems(draw: st.DrawFn, most_documents: int = 40) -> SparseProblem:
    """Empty vectors, masses of equal scores, scores that round to 0, k above the number of documents."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    vocabulary, weights = draw(st.sampled_from(VOCABULARIES)), draw(st.sampled_from(sorted(WEIGHTS)))
    counts = draw(st.integers(0, 6)), draw(st.integers(0, most_documents))
    queries, documents = (
        random_batch(generator, count, vocabulary, draw(st.integers(0, 12)), weights) for count in counts
    )
    if draw(st.booleans()):
        everywhere = SparseBatch.from_lists([[(vocabulary - 1, 1.0)]] * len(documents), vocabulary)
        both = documents.to_scipy() + everywhere.to_scipy()
        documents = SparseBatch.from_scipy(both)
    return SparseProblem(queries, documents, draw(st.integers(1, most_documents + 5)))
