"""What a first stage finds of the hard negatives, on a few documents."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("pylate")

from benchmarks.quality import first_stage_cranfield as benchmark
from pylate_fastmaxsim import TokenBatch
from pylate_fastmaxsim.retrieval.static.tokens import TokenIds


def test_hard_negatives_are_the_best_without_positives():
    queries = TokenBatch.from_list([torch.ones(1, 1), -torch.ones(1, 1)])
    documents = TokenBatch.from_list([torch.full((1, 1), float(size)) for size in range(30)])
    found = benchmark.hard_negatives(queries, documents, [{29, 3}, {0, 1, 2}])
    assert found == [{*range(19, 29)}, {*range(3, 13)}]


def test_the_share_is_of_all_documents_that_are_wanted():
    assert benchmark.share([{1, 2, 3}, {4}], torch.tensor([[2, 9], [-1, 4]])) == 0.5


def test_each_stage_can_search():
    documents = TokenIds.from_lists([[0, 1], [1, 2], [2, 2, 3]])
    vectors = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    for name, model in benchmark.first_stages(vectors, documents):
        _, found = model.search(TokenIds.from_lists([[0]]), model.documents(documents), 2)
        assert found[0, 0] == 0, name
