"""Sparse search on a GPU, against the definition."""

from __future__ import annotations

import pytest
import torch

from tests.support.sparse_cases import CASES, Case, blocks_of, check, check_at_least, check_order, check_removed, drawn

pytest.importorskip("triton")

from pylate_fastmaxsim.kernels.sparse import launch  # noqa: E402

pytestmark = pytest.mark.cuda

# Blocks are of 16,384 documents here.
LARGE = {
    "several blocks": Case(60_000, 20, 500, 30, 100),
    "equal scores in masses": Case(150_000, 3, 3, 2, 7, "equal", everywhere=True),
    "wide vocabulary": Case(20_000, 5, 250_000, 60, 50, dtype=torch.float16),
    "deep": Case(40_000, 3, 300, 30, 4096),
}


@pytest.mark.parametrize(
    "case", [*CASES.values(), *LARGE.values()], ids=[*CASES, *(f"large, {name}" for name in LARGE)]
)
def test_bits_are_those_of_the_definition(case):
    check(case, "cuda", None)


def test_removed_documents_known_scores_and_order():
    check_removed("cuda", None)
    check_at_least("cuda", None)
    check_order("cuda", None)


def test_candidates_that_are_lost_are_found_again(monkeypatch):
    monkeypatch.setattr(launch, "ROOM", 0)
    for case in (Case(150_000, 4, 60, 20, 300, "rising"), LARGE["equal scores in masses"]):
        check(case, "cuda", None)


def test_the_same_bits_every_time_and_for_any_batch():
    case = LARGE["several blocks"]
    queries, documents = drawn(case)
    blocks = blocks_of(documents, "cuda", None)
    own = queries.to("cuda")
    first = blocks.search(own.offsets, own.terms, own.weights, case.k)
    for _ in range(5):
        assert all(map(torch.equal, first, blocks.search(own.offsets, own.terms, own.weights, case.k)))
    for query in range(len(queries)):
        one = queries.select(torch.tensor([query])).to("cuda")
        alone = blocks.search(one.offsets, one.terms, one.weights, case.k)
        assert all(torch.equal(row[query], single[0]) for row, single in zip(first, alone, strict=True))
