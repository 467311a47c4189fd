"""Sparse collections of every kind that a search must get right, and a search of them by the blocks of a GPU's index."""

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from pylate_fastmaxsim import reference
from pylate_fastmaxsim.kernels.sparse import launch, postings
from pylate_fastmaxsim.sparse import SparseBatch
from tests.support.sparse_vectors import assert_same


@dataclass(frozen=True)
class Case:
    documents: int
    queries: int
    vocabulary: int
    terms: int  # at most, of a vector
    k: int
    weights: str = "any"  # "equal": all 1; see `weight_of`
    dtype: torch.dtype = torch.float32
    everywhere: bool = False  # term 0 in all documents


CASES = {
    "plain": Case(3000, 5, 200, 20, 10),
    "deep": Case(3000, 3, 200, 20, 500, dtype=torch.float16),
    "equal scores in masses": Case(9000, 3, 3, 2, 7, "equal", everywhere=True),
    "few sizes": Case(5000, 4, 60, 6, 20, "few"),
    "more than there are": Case(700, 3, 50, 3, 900),
    "one document": Case(1, 2, 9, 5, 3),
    "int32 terms": Case(2500, 3, 70_000, 30, 10),
    "weights that underflow": Case(2500, 3, 60, 8, 20, "tiny"),
    "weights of every size": Case(2500, 3, 60, 12, 20, "wide"),
    "scores beyond float32": Case(2500, 3, 60, 8, 20, "huge"),
    "long queries": Case(1500, 2, 2000, 700, 10),
}


def weight_of(kind: str, row: int, draw: random.Random) -> float:
    if kind == "few":  # so that many scores are equal
        return draw.choice([0.5, 1.0, 2.0])
    if kind == "wide":
        return 2.0 ** draw.uniform(-20, 20)
    if kind == "rising":  # the later the better, so that every threshold comes too late
        return 1.0 + row
    kinds = {"equal": 1.0, "huge": 2.0 ** draw.uniform(60, 66), "tiny": 1e-30 * draw.random() + 1e-38}
    return kinds.get(kind, draw.random() + 1e-3)


def batch_of(count: int, case: Case, draw: random.Random) -> SparseBatch:
    """Vectors of which some are empty, unless a term is everywhere."""
    rows = []
    for row in range(count):
        terms = draw.sample(range(case.vocabulary), draw.randint(0, min(case.terms, case.vocabulary)))
        if case.everywhere and 0 not in terms:
            terms.append(0)
        rows.append([(term, weight_of(case.weights, row, draw)) for term in terms])
    batch = SparseBatch.from_lists(rows, case.vocabulary)
    return SparseBatch(batch.offsets, batch.terms, batch.weights.to(case.dtype), batch.vocabulary)


def drawn(case: Case, seed: int = 0) -> tuple[SparseBatch, SparseBatch]:
    draw = random.Random(seed)
    return batch_of(case.queries, case, draw), batch_of(case.documents, case, draw)


def blocks_of(documents: SparseBatch, device: str, engine, live: Tensor | None = None) -> launch.DeviceBlocks:
    blocks = launch.DeviceBlocks(documents.vocabulary, device, engine)
    size = postings.DOCUMENTS_PER_BLOCK
    for block in range(-(-len(documents) // size)):
        rows = torch.arange(block * size, min((block + 1) * size, len(documents)))
        part = documents.select(rows).to(device)
        blocks.set(block, part.offsets, part.terms, part.weights, None if live is None else live[rows].to(device))
    return blocks


def assert_found(blocks: launch.DeviceBlocks, queries: SparseBatch, k: int, expected, at_least=None) -> None:
    """Scores and positions, bit for bit."""
    own = queries.to(blocks.device)
    assert_same(blocks.search(own.offsets, own.terms, own.weights, k, at_least), expected)


def check(case: Case, device: str, engine, seed: int = 0) -> None:
    queries, documents = drawn(case, seed)
    expected = reference.sparse_top(queries, documents, case.k)
    assert_found(blocks_of(documents, device, engine), queries, case.k, expected)


def check_removed(device: str, engine) -> None:
    case = CASES["few sizes"]
    queries, documents = drawn(case)
    live = torch.rand(len(documents), generator=torch.Generator().manual_seed(0)) < 0.5
    places = live.nonzero()[:, 0]
    scores, expected = reference.sparse_top(queries, documents.select(places), case.k)
    expected = torch.where(expected < 0, -1, places[expected.clamp(min=0)])
    assert_found(blocks_of(documents, device, engine, live), queries, case.k, (scores, expected))


def check_at_least(device: str, engine) -> None:
    case = CASES["few sizes"]
    queries, documents = drawn(case)
    expected = reference.sparse_top(queries, documents, case.k)
    assert_found(blocks_of(documents, device, engine), queries, case.k, expected, expected[0][:, -1].to(device))


def check_order(device: str, engine) -> None:
    # Their sums in float64 round to different float32 numbers in the two directions.
    weights = [1.0, 2.0**-24, 2.0**-53, 2.0**-53]
    rows = [list(enumerate(weights)), list(enumerate(reversed(weights)))]
    documents = SparseBatch.from_lists(rows, 4)
    queries = SparseBatch.from_lists([[(term, 1.0) for term in range(4)]], 4)
    expected = torch.tensor([[1.0 + 2.0**-23, 1.0]]), torch.tensor([[1, 0]])
    assert_found(blocks_of(documents, device, engine), queries, 2, expected)
