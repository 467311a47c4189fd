"""The Triton kernels of sparse search, interpreted, against the definition."""

from __future__ import annotations

import pytest
import torch
from sparse_cases import CASES, Case, check, check_at_least, check_order, check_removed

pytest.importorskip("triton")

from interpreter import interpreted  # noqa: E402, F401

from pylate_fastmaxsim.kernels.sparse import launch, postings  # noqa: E402
from pylate_fastmaxsim.kernels.sparse.triton_engine import TritonEngine  # noqa: E402

pytestmark = [pytest.mark.interpret, pytest.mark.usefixtures("interpreted")]

DOCUMENTS = 512


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(postings, "DOCUMENTS_PER_BLOCK", DOCUMENTS)
    monkeypatch.setattr(launch, "DOCUMENTS_PER_BLOCK", DOCUMENTS)
    return TritonEngine(torch.device("cpu"), DOCUMENTS)


@pytest.mark.parametrize(
    "case",
    [
        Case(1200, 2, 100, 12, 10),
        *(CASES[name] for name in ("more than there are", "int32 terms", "scores beyond float32")),
    ],
)
def test_bits_are_those_of_the_definition(case, engine):
    check(case, "cpu", engine)


def test_removed_documents_are_not_found(engine):
    check_removed("cpu", engine)


def test_sums_are_in_the_order_of_terms(engine):
    check_order("cpu", engine)


def test_known_scores_lose_nothing(engine):
    check_at_least("cpu", engine)


def test_candidates_that_are_lost_are_found_again(engine, monkeypatch):
    monkeypatch.setattr(launch, "ROOM", 2)
    check(Case(4000, 2, 3, 2, 7, "equal", everywhere=True), "cpu", engine)
