"""Scores of candidates are those of the definition, and documents that are no candidate are not encoded."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from accelerate import PartialState
from datasets import Dataset

from pylate_fastmaxsim import TokenBatch, reference
from pylate_fastmaxsim.recipes.config.schema import DataSection, MiningSection
from pylate_fastmaxsim.recipes.mining import negatives
from pylate_fastmaxsim.recipes.mining.pairs import Pairs
from pylate_fastmaxsim.recipes.mining.resumable import Work

QUERIES, DOCUMENTS = 7, 60


def ragged(rng: np.random.Generator, count: int) -> TokenBatch:
    return TokenBatch.from_list([torch.from_numpy(rng.normal(size=(n, 4))).float() for n in rng.integers(1, 9, count)])


def best_candidates(queries, documents, table, k, folder, monkeypatch) -> tuple:
    """What the search finds of a table of candidates, and the documents that it encodes."""
    encoded = []

    def batches(search, part, bar):
        numbers = torch.tensor([int(text) for text in part["text"]], dtype=torch.int64)
        encoded.extend(numbers.tolist())
        return map(documents.select, numbers.split(9))

    monkeypatch.setattr(negatives.DocumentSearch, "_encoded", batches)
    monkeypatch.setattr(negatives.DocumentSearch, "_queries", queries)
    texts = Dataset.from_dict({"text": list(map(str, range(len(documents))))})
    section = MiningSection(
        pairs=DataSection(source="hub", name="a"), teacher="b", range_max=k - 1, documents_per_part=20
    )
    pairs = Pairs(None, texts, [], "")
    monkeypatch.setattr(negatives, "documents_kept", lambda *args: k)
    work = Work(folder, PartialState())
    search = negatives.DocumentSearch(None, pairs, section, work, {"model": {"name_or_path": "c"}})
    return *search.best_candidates(table), encoded


@pytest.mark.parametrize("at_once", [1 << 20, 5])
def test_the_best_candidates_are_those_of_the_definition(at_once, tmp_path, monkeypatch):
    monkeypatch.setattr(negatives, "PAIRS_AT_ONCE", at_once)
    rng = np.random.default_rng(0)
    queries, documents = ragged(rng, QUERIES), ragged(rng, DOCUMENTS)
    exact = reference.maxsim(queries, documents).numpy()
    # From no candidate to nearly all documents, in any order, filled up with -1; none in the third part.
    table = np.full((QUERIES, DOCUMENTS), -1, dtype=np.int32)
    for query, count in enumerate((0, 40, 1, 17, 30, 5, 3)):
        table[query, :count] = rng.permutation(40)[:count]
    table[1] = np.where((table[1] - 20) % 7 == 0, -1, table[1])  # so that some are a candidate of no query
    best, kept, encoded = best_candidates(queries, documents, table, 6, tmp_path, monkeypatch)
    candidates = [[x for x in row if x >= 0] for row in table.tolist()]
    assert encoded == sorted({x for row in candidates for x in row}) and len(encoded) < DOCUMENTS
    for query, row in enumerate(candidates):
        expected = sorted(row, key=lambda x: -exact[query, x])[:6]
        assert kept[query].tolist() == expected + [-1] * (6 - len(expected))
        assert np.isneginf(best[query, len(expected) :]).all()
        np.testing.assert_allclose(best[query, : len(expected)], exact[query, expected], rtol=1e-5, atol=1e-5)


def test_of_equal_scores_the_lower_document_comes_first(tmp_path, monkeypatch):
    documents = TokenBatch.from_list([torch.full((1, 1), 2.0 if x in (7, 30) else 1.0) for x in range(40)])
    queries, table = TokenBatch.from_list([torch.ones(1, 1)]), np.array([[4, 9, 2, 7, 1, 30]], dtype=np.int32)
    best, kept, _ = best_candidates(queries, documents, table, 4, tmp_path, monkeypatch)
    assert kept.tolist() == [[7, 30, 1, 2]] and best.tolist() == [[2, 2, 1, 1]]
