"""Ranks that each hold a share of an index find, together, the same bits as one that holds all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from sparse_vectors import sorted_scores, sparse_vectors

from pylate_fastmaxsim import SparseIndex
from pylate_fastmaxsim.kernels.sparse import postings

pytestmark = pytest.mark.process

RANKS = 2
VOCABULARY = 30


def _index(folder: str, count: int, removed: list[int]) -> SparseIndex:
    """This rank's share of an index that rank 0 writes."""
    postings.DOCUMENTS_PER_BLOCK = 8
    path = Path(folder) / f"index-{count}-{len(removed)}"
    if dist.get_rank() == 0 and not path.exists():
        index = SparseIndex.build([sparse_vectors(count, VOCABULARY, seed=count)])
        index.remove(removed)
        index.save(path)
    dist.barrier()
    return SparseIndex.load(path, shard=(dist.get_rank(), dist.get_world_size()))


def _same_as_whole(folder: str) -> None:
    # In the first the last rank has no document, in the second most; scores are equal in masses across ranks.
    for count, removed in ((8, []), (37, []), (37, [0, 20, 36]), (1, [0])):
        index = _index(folder, count, removed)
        documents = sparse_vectors(count, VOCABULARY, seed=count)
        assert len(index) == count
        for queries in (sparse_vectors(11, VOCABULARY, seed=1), sparse_vectors(0, VOCABULARY, seed=1)):
            for k in (1, 5, 50):
                found = index.search(queries, k)
                for ours, theirs in zip(found, sorted_scores(queries, documents, k, {*removed}), strict=True):
                    assert torch.equal(ours, theirs)


def _shares(folder: str) -> None:
    index = _index(folder, 37, [])
    sizes = [None] * RANKS
    dist.all_gather_object(sizes, index.nbytes)
    whole = SparseIndex.load(Path(folder) / "index-37-0")
    assert sum(sizes) == whole.nbytes and max(sizes) < 0.75 * whole.nbytes


def _different_questions(folder: str) -> None:
    index = _index(folder, 37, [])
    rank = dist.get_rank()
    same, own = sparse_vectors(3, VOCABULARY, seed=1), sparse_vectors(3, VOCABULARY, seed=1 + rank)
    reversed_by_one = same.select(torch.tensor([0, 1, 2] if rank else [2, 1, 0]))
    more = sparse_vectors(3 + rank, VOCABULARY, seed=1)
    for queries, k in ((own, 5), (same, 5 + rank), (reversed_by_one, 5), (more, 5)):
        with pytest.raises(ValueError, match="^SparseIndex.search: all ranks must pass the same queries and k"):
            index.search(queries, k)
    index.search(same, 5)


def _read_only(folder: str) -> None:
    index = _index(folder, 37, [])
    for name, argument in (("add", []), ("remove", [0]), ("save", folder)):
        with pytest.raises(ValueError, match=f"^SparseIndex.{name}: an index that was loaded as a shard cannot be"):
            getattr(index, name)(argument)


def _another_group(folder: str) -> None:
    _index(folder, 37, [])
    index = SparseIndex.load(Path(folder) / "index-37-0", shard=(0, 3))
    with pytest.raises(ValueError, match="^SparseIndex.search: the index was loaded for rank 0 of 3, but this is rank"):
        index.search(sparse_vectors(3, VOCABULARY, seed=1), 5)
    with pytest.raises(ValueError, match="^SparseIndex.load: shard must be a rank from 0 and a larger number of ranks"):
        SparseIndex.load(Path(folder) / "index-37-0", shard=(2, 2))


CASES = {
    "same as whole": _same_as_whole,
    "shares": _shares,
    "different questions": _different_questions,
    "read only": _read_only,
    "another group": _another_group,
}


@pytest.mark.parametrize("case", CASES)
def test_shards(outcomes, case):
    for rank, outcome in enumerate(outcomes(case)):
        assert outcome == "passed", f"rank {rank}: {outcome}"
