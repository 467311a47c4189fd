"""Scores of candidates are those of the definition, and documents that are no candidate are not encoded."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pylate_fastmaxsim import TokenBatch, reference
from pylate_fastmaxsim.recipes.mining import negatives as of_candidates

QUERIES, DOCUMENTS, PART = 7, 60, slice(10, 50)


def ragged(rng: np.random.Generator, count: int) -> TokenBatch:
    return TokenBatch.from_list([torch.from_numpy(rng.normal(size=(n, 4))).float() for n in rng.integers(1, 9, count)])


@pytest.mark.parametrize("at_once", [1 << 20, 5])
def test_the_best_candidates_are_those_of_the_definition(at_once, monkeypatch):
    monkeypatch.setattr(of_candidates, "PAIRS_AT_ONCE", at_once)
    rng = np.random.default_rng(0)
    queries, documents = ragged(rng, QUERIES), ragged(rng, DOCUMENTS)
    exact = reference.maxsim(queries, documents).numpy()
    # From no candidate to all documents, in any order, filled up with -1.
    table = np.full((QUERIES, DOCUMENTS), -1, dtype=np.int32)
    for query, count in enumerate((0, 60, 1, 17, 30, 5, 3)):
        table[query, :count] = rng.permutation(DOCUMENTS)[:count]
    table[1] = np.where((table[1] - 20) % 7 == 0, -1, table[1])  # so that some are a candidate of no query
    asked = []

    def encoded(numbers):
        asked.extend(numbers)
        for batch in torch.from_numpy(numbers).split(9):
            yield documents.select(batch)

    rows, found, scores = of_candidates.score_candidates(queries, encoded, table, PART)
    inside = [[x for x in row if PART.start <= x < PART.stop] for row in table]
    assert asked == sorted({x for row in inside for x in row}) and len(asked) < PART.stop - PART.start
    assert sorted(zip(rows, found, strict=True)) == sorted((q, x) for q, row in enumerate(inside) for x in row)
    np.testing.assert_allclose(scores, exact[rows, found], rtol=1e-5, atol=1e-5)
    best, kept = of_candidates.best_candidates(rows, found, scores, QUERIES, k=6)
    for query, row in enumerate(inside):
        expected = sorted(row, key=lambda x: -exact[query, x])[:6]
        assert kept[query].tolist() == expected + [-1] * (6 - len(expected))
        assert np.isneginf(best[query, len(expected) :]).all()
        np.testing.assert_allclose(best[query, : len(expected)], exact[query, expected], rtol=1e-5, atol=1e-5)


def test_of_equal_scores_the_lower_document_comes_first():
    rows, found = np.zeros(6, dtype=np.int64), np.array([4, 9, 2, 7, 1, 3])
    best, kept = of_candidates.best_candidates(rows, found, np.array([1, 1, 1, 2, 1, 2], dtype=np.float32), 1, k=4)
    assert kept.tolist() == [[3, 7, 1, 2]] and best.tolist() == [[2, 2, 1, 1]]


def test_a_part_without_candidates_has_an_empty_result():
    queries = ragged(np.random.default_rng(0), 2)
    found = of_candidates.score_candidates(queries, lambda numbers: iter(()), np.full((2, 3), 60, dtype=np.int32), PART)
    best, kept = of_candidates.best_candidates(*found, 2, k=3)
    assert best.shape == kept.shape == (2, 0)
